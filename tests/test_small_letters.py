"""--lowercase: a model that reads and writes small letters only."""

import json
import shutil
import types
from pathlib import Path

import pytest
import torch
from helpers import (
    checkpoint,
    contents,
    needed,
    refused,
    run,
    same,
    trained,
    training_command,
    write_little,
)

import annotated_transformer as book

SMALL = ["--pieces", 150, "--lowercase"]
SIZES = dict(N=1, d_model=16, d_ff=16, h=2)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make the preset tiny very small."""
    monkeypatch.setitem(book.PRESETS, "tiny", SIZES)
    write_little(monkeypatch)


@pytest.fixture(scope="module")
def out(few, tmp_path_factory):
    """The folder of a run in small letters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(book.PRESETS, "tiny", SIZES)
        write_little(patch)
        return trained(
            few, tmp_path_factory.mktemp("small") / "out", 4, *SMALL
        )


# ---------------------------------------------------------------- translators


PAIRS = [("Der Hund jagt den BALL", "The Dog chases the ball")] * 60


@pytest.fixture
def translator():
    return book.untrained_translator(
        PAIRS, ("de", "en"), SIZES, pieces=45, lowercase=True
    )


def test_case_makes_no_difference_to_a_model(translator):
    for text in ("der Hund", "DER HUND", "der hund"):
        assert translator.split(text) == translator.split("der hund")
        ids = translator.encode_texts(text, text.upper())
        assert ids == translator.encode_texts("der hund", "der hund")
        packed = book.pack(translator, [(text, text.upper())])
        assert [*packed] == [ids]
        cut = translator.src_vocab.split
        assert translator.encode_texts(text, text.upper(), cut) == ids
    assert book.UNK not in ids[0]


def test_what_is_written_is_small(translator):
    ids = range(len(book.SPECIALS), len(translator.tgt_vocab))
    vocabularies = translator.tgt_vocab, translator.src_vocab
    other = book.Translator(
        translator.model, vocabularies, ("en", "de"), lowercase=True
    )
    for text in (translator.join([*ids]), other.join([*ids])):
        assert text == text.lower() and "hund" in text.split()
    assert other.split("HUND") == translator.split("hund")


def test_the_text_closest_to_a_reference_is_that_in_small_letters(translator):
    """The exact one, though one with wrong words has more of the capitals."""
    reference = "Ein Hund jagt einen Ball ."
    texts = ["sund jagt einen all .", reference.lower()]
    found = [types.SimpleNamespace(tokens=text) for text in texts]
    translator.join = lambda text: text
    assert book.closest(translator, [found], [reference]) == texts[1:]


def test_pieces_are_needed():
    with pytest.raises(
        book.InputError, match="small letters need word pieces"
    ):
        book.learn_vocabularies(PAIRS, ("de", "en"), lowercase=True)


# ---------------------------------------------------------------- the command


def test_training_is_that_of_text_in_small_letters(few, out, tmp_path):
    """Put into small letters before, the same text gives the same weights."""
    lower = tmp_path / "lower"
    lower.mkdir()
    for path in few.iterdir():
        (lower / path.name).write_text(
            path.read_text("utf-8").lower(), "utf-8"
        )
    other = trained(lower, tmp_path / "out", 4, "--pieces", 150)
    assert same(checkpoint(out)["model"], checkpoint(other)["model"])
    names = ["pieces.model", "weights.pt"]
    assert [(other / n).read_bytes() for n in names] == [
        (out / n).read_bytes() for n in names
    ]
    plain = trained(few, tmp_path / "plain", 4, "--pieces", 150)
    assert not same(checkpoint(out)["model"], checkpoint(plain)["model"])


def test_the_folder_holds_all_that_translation_needs(few, out, capsys):
    assert book.load_translator(out).lowercase
    found = run(capsys, "translate", "--model", out, "der HUND")
    assert found == run(capsys, "translate", "--model", out, "Der hund")
    assert found[0] == 0 and "unknown" not in found[2]


def test_a_run_of_small_letters_goes_on_exactly(few, out, tmp_path, capsys):
    """And what was encoded is found again."""
    half = trained(few, tmp_path / "half", 2, *SMALL)
    command = training_command(few, half, 4, *SMALL, "--resume")
    status, _, errors = run(capsys, *command)
    assert status == 0 and "encoded before" in errors
    assert same(checkpoint(half), checkpoint(out))
    assert book.describe(book.load_translator(half)) == book.describe(
        book.load_translator(out)
    )


@pytest.mark.parametrize("begun", [SMALL, SMALL[:2]])
def test_it_cannot_be_changed_on_the_way(few, tmp_path, capsys, begun):
    folder = trained(few, tmp_path / "out", 2, *begun)
    before = contents(folder)
    other = SMALL[:2] if begun == SMALL else SMALL
    command = training_command(few, folder, 4, *other, "--resume")
    assert "--lowercase has changed" in refused(capsys, *command)
    assert contents(folder) == before


def test_a_training_from_such_a_model_keeps_its_letters(
    few, out, tmp_path, capsys
):
    command = ["train", "--corpus", few, "--out", tmp_path / "on", "--steps",
               1, "--device", "cpu", "--from", out]  # fmt: skip
    message = refused(capsys, *command, "--lowercase")
    assert "--lowercase is the model's own" in message
    status, _, errors = run(capsys, *command)
    assert status == 0, errors
    new, old = map(book.load_translator, (tmp_path / "on", out))
    assert new.lowercase and old.lowercase
    command = [*command[:-2], "--steps", 2, "--from", out, "--resume"]
    assert run(capsys, *command)[0] == 0


@pytest.mark.parametrize("small_first", [True, False])
def test_models_of_other_letters_have_no_mean(
    out, tmp_path, capsys, small_first
):
    """Though their pieces be the same."""
    plain = Path(shutil.copytree(out, tmp_path / "plain"))
    facts = json.loads((plain / "model.json").read_text("utf-8"))
    del facts["lowercase"]
    (plain / "model.json").write_text(json.dumps(facts), "utf-8")
    folders = (out, plain) if small_first else (plain, out)
    models = [x for folder in folders for x in ("--model", folder)]
    message = refused(capsys, "average", *models, "--out", tmp_path / "mean")
    assert "differ in lowercase" in message


def test_an_export_says_that_it_reads_small_letters(out, tmp_path, capsys):
    needed("ctranslate2")
    command = "export", "--format", "ctranslate2", "--model", out, "--out"
    status, _, errors = run(capsys, *command, tmp_path / "exported")
    assert status == 0 and "small letters" in errors


@pytest.mark.parametrize("value", [0, "", None, [True]])
def test_a_damaged_description_is_named(out, tmp_path, capsys, value):
    folder = Path(shutil.copytree(out, tmp_path / "copy"))
    facts = json.loads((folder / "model.json").read_text("utf-8"))
    facts["lowercase"] = value
    (folder / "model.json").write_text(json.dumps(facts), "utf-8")
    message = refused(capsys, "translate", "--model", folder, "ja")
    assert "model.json: damaged" in message and "lowercase" in message


def test_one_cache_keeps_the_two_apart(few, out, tmp_path, capsys):
    """Two runs that share a folder of encoded pairs, one after the other."""
    cache = ["--cache", tmp_path / "cache"]
    for name, how in (("plain", SMALL[:2]), ("small", SMALL)):
        command = training_command(few, tmp_path / name, 4, *how, *cache)
        assert run(capsys, *command)[0] == 0
    assert same(
        checkpoint(tmp_path / "small")["model"], checkpoint(out)["model"]
    )


def test_both_directions_and_other_cuts(few, tmp_path, capsys):
    """Tags stay as they are; words are cut in small letters."""
    more = "--both", "--bpe-dropout", 0.5
    both = trained(few, tmp_path / "both", 3, *SMALL, *more)
    found = [
        run(capsys, "translate", "--model", both, *way, text)
        for way in ([], ["--reverse"])
        for text in ("der HUND", "Der hund")
    ]
    assert found[0] == found[1] and found[2] == found[3]
    model = book.load_translator(both)
    for one in (model, model.reversed()):
        assert one.split("HUND")[0] == f"<2{one.tgt}>"
    assert all("unknown" not in errors for _, _, errors in found)
    on = ["train", "--corpus", few, "--src", "en", "--tgt", "de", "--steps", 1,
          "--device", "cpu", "--from", both, "--out", tmp_path]  # fmt: skip
    assert run(capsys, *on)[0] == 0
    assert book.load_translator(tmp_path).lowercase


def test_capitals_are_not_asked_of_it(few, out, tmp_path, capsys):
    """Cased figures would only say that there are none."""
    path = tmp_path / "figures.json"
    status, shown, _ = run(
        capsys, "evaluate", "--model", out, "--corpus", few, "--split", "val",
        "--beam", 1, "--json", path,
    )  # fmt: skip
    facts = json.loads(path.read_text("utf-8"))
    assert status == 0 and "small letters only" in shown
    assert "bleu_cased" not in facts and "signature_cased" not in facts
    assert "case:lc" in facts["chrf_signature"]
    assert f"chrF           {facts['chrf']:.2f}  " in shown


def test_whole_words_are_refused(few, tmp_path, capsys):
    command = training_command(few, tmp_path / "out", 1, "--lowercase")
    assert "--lowercase needs --pieces" in refused(capsys, *command)


def test_weights_are_those_of_tensors_alone(out):
    for name in ("weights.pt", "checkpoint.pt", "pairs.pt"):
        torch.load(out / name, weights_only=True)
