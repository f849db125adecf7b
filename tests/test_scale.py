"""A corpus is encoded once, in a stream, and read from where it was put."""

import gzip
import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys

import pytest
import torch
from helpers import (
    ONE_THREAD,
    SCRIPT,
    checkpoint,
    contents,
    refused,
    run,
    same,
    trained,
    training_command,
    write_little,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import EOS, PAD, SPECIALS, InputError

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = [(pair.de, pair.en) for pair in book.toy_corpus()["train"][:300]]
LEARNED = ("--pieces", 120)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Make the preset tiny very small."""
    sizes = dict(N=1, d_model=16, d_ff=16, h=2, dropout=0.1)
    monkeypatch.setitem(book.PRESETS, "tiny", sizes)
    write_little(monkeypatch)


@pytest.fixture
def folder(tmp_path):
    """A corpus of one's own, to be changed at will."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder, "train", PAIRS)
    write(folder, "val", PAIRS[:2])
    return folder


def write(folder, part, pairs):
    for language, side in zip(("de", "en"), zip(*pairs)):
        text = "".join(f"{line}\n" for line in side)
        (folder / f"{part}.{language}").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def pieces():
    """One vocabulary of pieces, with the tags of both directions."""
    texts = itertools.chain.from_iterable(PAIRS)
    return book.Pieces.learn(texts, 120, ["<2de>", "<2en>"])


def coder(vocabulary, both=False):
    """A translator that has no model."""
    languages = "de", "en"
    return book.Translator(None, [vocabulary] * 2, languages, both)


# ------------------------------------------------------ what is in the arrays


@pytest.mark.parametrize("both", [False, True])
def test_the_arrays_hold_what_plain_encoding_gives(pieces, both):
    translator = coder(pieces, both)
    odd = [("ж 한 ♞♞", "<s> </s> <pad>"), ("  der  Mann\u3000", "ｔｈｅ… man")]
    packed = book.pack(translator, PAIRS + odd)
    assert list(packed) == book.encode_all(translator, PAIRS + odd)


def test_what_the_pieces_lack_is_counted(pieces):
    """On either side, each sign, and nothing that they have."""
    odd = [("der \u2660\u2663 \u2660", "the man"), ("der", "the\u2663")]
    pairs = [*PAIRS[:5], *odd]
    packed = book.pack(coder(pieces), pairs)
    assert packed.unknown == {"\u2660": 2, "\u2663": 2}
    assert book.pack(coder(pieces), PAIRS).unknown == {}
    words = book.Vocabulary([*SPECIALS, "der"])  # rare words are unknown
    assert book.pack(coder(words), pairs).unknown == {}


@pytest.mark.parametrize("both", [False, True])
def test_the_portions_leave_no_trace(pieces, both, monkeypatch):
    translator, portions = coder(pieces, both), book.portions
    whole = book.pack(translator, PAIRS)
    monkeypatch.setattr(book, "portions", lambda items: portions(items, 7))
    assert list(book.pack(translator, PAIRS)) == list(whole)


@pytest.mark.parametrize("words", [100, 65_535, 65_536, 65_537, 70_000])
def test_numbers_of_any_size_come_back(words):
    names = [f"w{n}" for n in range(words - len(SPECIALS))]
    vocabulary = book.Vocabulary([*SPECIALS, *names])
    texts = [(" ".join(names[-3:]), names[0]), (names[-1], names[-1])]
    packed = book.pack(coder(vocabulary), texts)
    assert packed[0][0] == [words - 3, words - 2, words - 1, EOS]
    assert packed[1] == ([words - 1, EOS], [book.BOS, words - 1, EOS])
    assert packed.tokens.element_size() == (2 if words <= 65_536 else 4)


def test_there_is_nothing_before_the_first_pair_or_after_the_last(pieces):
    for both in (False, True):
        packed = book.pack(coder(pieces, both), PAIRS[:3])
        assert len(packed) == len(list(packed)) == 3 * (1 + both)
        for i in (-1, len(packed)):
            with pytest.raises(IndexError):
                packed[i]


# ----------------------------------------------------------- the same batches


@settings(max_examples=200, deadline=None)
@given(
    widths=st.lists(st.integers(1, 60), max_size=200),
    budget=st.integers(1, 400),
    seed=st.integers(0, 9),
)
def test_batches_are_cut_where_the_padded_rectangle_is_full(
    widths, budget, seed
):
    """Sorted by width, each batch takes as many as fit, in random order."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(len(widths), generator=draw).tolist()
    groups, row = [], sorted(shuffled, key=widths.__getitem__)
    while row:
        fit = (n for n in range(len(row), 1, -1)
               if n * widths[row[n - 1]] <= budget)  # fmt: skip
        size = next(fit, 1)
        groups.append(row[:size])
        row = row[size:]
    order = torch.randperm(len(groups), generator=draw).tolist()
    got = book.token_batches(widths, budget, generator)
    assert got == [groups[i] for i in order]


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("skip", [0, 30])
def test_the_storage_does_not_decide_the_batches(pieces, both, skip):
    translator = coder(pieces, both)
    packed, plain = (
        book.stream(encode(translator, PAIRS), 400, seed=3, skip=skip)
        for encode in (book.pack, book.encode_all)
    )
    for one, other in itertools.islice(zip(packed, plain), 60):
        assert one.src.equal(other.src) and one.tgt.equal(other.tgt)
        assert one.src.dtype == torch.long and (one.src != PAD).any()


# ------------------------------------------- choosing pieces from a sample


def test_a_sample_has_its_size_and_the_order_of_the_whole():
    for most in (0, 1, 50, 99, 100, 1000):
        sample = list(book.some(range(100), most))
        assert sample == sorted(set(sample))
        assert len(sample) == min(most, 100)
        assert sample == list(book.some(range(100), most))


def test_a_sample_is_of_the_whole_corpus():
    sample = list(book.some(range(10_000), 1000))
    for part in range(0, 10_000, 1000):
        found = sum(part <= i < part + 1000 for i in sample)
        assert 60 < found < 140  # 100, give or take four deviations


def test_pieces_are_learned_from_the_sample_and_nothing_else():
    def learn(pairs):
        [vocabulary, _] = book.learn_vocabularies(
            pairs, ("de", "en"), pieces=100, most=200
        )
        return vocabulary.model

    sample = list(book.some(PAIRS, 200))
    assert learn(PAIRS) == learn(sample) != learn(PAIRS[:200])


# ------------------------------------------------------------ the second start


def forbid(monkeypatch, *names):
    """Let nothing call these functions of the book."""

    def forbidden(*arguments, **options):
        raise AssertionError("done a second time")

    for name in names:
        monkeypatch.setattr(book, name, forbidden)
    monkeypatch.setattr(book.Pieces, "learn", forbidden)
    monkeypatch.setattr(book.Vocabulary, "build", forbidden)


@pytest.mark.parametrize("how", [LEARNED, (*LEARNED, "--both"), ()])
def test_a_resumed_run_encodes_nothing(
    capsys, folder, tmp_path, monkeypatch, how
):
    whole = trained(folder, tmp_path / "whole", 4, *how)
    out = trained(folder, tmp_path / "out", 2, *how)
    forbid(monkeypatch, "pack")
    command = training_command(folder, out, 4, *how, "--resume")
    status, _, errors = run(capsys, *command)
    assert status == 0, errors
    assert "300 training pairs, 2 for validation" in errors
    assert same(checkpoint(out), checkpoint(whole))


def test_a_shared_folder_serves_the_next_run(
    capsys, folder, tmp_path, monkeypatch
):
    alone = trained(folder, tmp_path / "alone", 2, *LEARNED, "--seed", 7)
    how = (*LEARNED, "--cache", tmp_path / "new" / "cache")
    first = trained(folder, tmp_path / "first", 2, *how)
    assert not (first / "pairs.pt").exists()
    forbid(monkeypatch, "pack")
    out = tmp_path / "second"
    command = training_command(folder, out, 2, *how, "--seed", 7)
    status, _, errors = run(capsys, *command)
    assert status == 0, errors
    assert str(tmp_path / "new" / "cache" / "pairs.pt") in errors
    mine, other = contents(alone), contents(out)
    assert set(mine) == {*other, "pairs.pt"}
    assert mine["pieces.model"] == other["pieces.model"]
    assert same(checkpoint(alone)["model"], checkpoint(out)["model"])


@pytest.mark.parametrize(
    "change, named",
    [(["--pieces", 110], "vocabulary"), (["--both"], "both"),
     (["--src", "en", "--tgt", "de"], "languages")],
)  # fmt: skip
def test_what_was_encoded_otherwise_is_encoded_anew(
    capsys, folder, tmp_path, change, named
):
    how = (*LEARNED, "--cache", tmp_path / "cache")
    trained(folder, tmp_path / "first", 1, *how)
    out = tmp_path / "second"
    command = training_command(folder, out, 1, *how, *change)
    status, _, errors = run(capsys, *command)
    assert status == 0
    [line] = [row for row in errors.splitlines() if "pairs.pt" in row]
    assert named in line
    alone = trained(folder, tmp_path / "alone", 1, *LEARNED, *change)
    assert same(checkpoint(alone)["model"], checkpoint(out)["model"])


# ------------------------------------------------------------- a file changed


def exchange(path, one, other):
    """Put other letters into a file; its size and date stay as they are."""
    state, content = path.stat(), path.read_bytes()
    assert one in content and len(one) == len(other)
    path.write_bytes(content.replace(one, other, 1))
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert path.stat().st_mtime_ns == state.st_mtime_ns


@pytest.mark.parametrize("changed", ["train.de", "train.en"])
@pytest.mark.parametrize("there", [True, False])
def test_a_run_is_not_resumed_with_a_changed_file(
    capsys, folder, tmp_path, changed, there
):
    out = trained(folder, tmp_path / "out", 2, *LEARNED)
    if not there:
        (out / "pairs.pt").unlink()
    before = contents(out)
    exchange(folder / changed, b"e", b"a")
    command = training_command(folder, out, 4, *LEARNED, "--resume")
    message = refused(capsys, *command)
    assert str(out) in message and changed in message
    [other] = {"train.de", "train.en"} - {changed}
    assert (other in message) is not there
    assert contents(out) == before
    exchange(folder / changed, b"a", b"e")


def test_a_new_run_reads_a_changed_file(capsys, folder, tmp_path):
    how = (*LEARNED, "--cache", tmp_path / "cache")
    trained(folder, tmp_path / "first", 1, *how)
    exchange(folder / "train.en", b"the", b"thy")
    out = tmp_path / "second"
    status, _, errors = run(capsys, *training_command(folder, out, 1, *how))
    assert status == 0 and "train.en" in errors
    alone = trained(folder, tmp_path / "alone", 1, *LEARNED)
    assert same(checkpoint(alone), checkpoint(out))


def test_the_same_texts_in_another_file_are_the_same(folder, tmp_path):
    whole = trained(folder, tmp_path / "whole", 4, *LEARNED)
    out = trained(folder, tmp_path / "out", 2, *LEARNED)
    for path in folder.glob("train.*"):
        packed = gzip.compress(path.read_bytes())
        path.with_name(f"{path.name}.gz").write_bytes(packed)
        path.unlink()
    trained(folder, out, 4, *LEARNED, "--resume")
    assert same(checkpoint(out), checkpoint(whole))


def test_who_holds_out_other_pairs_cannot_go_on(folder, tmp_path, capsys):
    """Of a run by an older version nobody is told that a file has changed."""
    for path in folder.glob("val.*"):
        path.unlink()
    out = trained(folder, tmp_path / "out", 1, *LEARNED)
    stored = torch.load(out / "pairs.pt", weights_only=True)
    facts = json.loads(stored["facts"])
    facts["wanted"]["held"] = 50_000
    torch.save(stored | {"facts": json.dumps(facts)}, out / "pairs.pt")
    state = checkpoint(out)
    described = json.loads(state["description"]) | {"data": "other"}
    state["description"] = json.dumps(described)
    torch.save(state, out / "checkpoint.pt")
    command = training_command(folder, out, 2, *LEARNED, "--resume")
    before = contents(out)
    message = refused(capsys, *command)
    assert "older version" in message and "train.de" not in message
    assert contents(out) == before


def test_val_files_that_came_or_went_are_named(folder, tmp_path, capsys):
    """They decide which pairs are for training; the program is the same."""
    for path in folder.glob("val.*"):
        path.rename(tmp_path / path.name)
    out = trained(folder, tmp_path / "out", 1, *LEARNED)
    for path in tmp_path.glob("val.*"):
        path.rename(folder / path.name)
    command = training_command(folder, out, 2, *LEARNED, "--resume")
    message = refused(capsys, *command)
    assert "val files were added" in message and "older" not in message
    other = trained(folder, tmp_path / "other", 1, *LEARNED)
    for path in folder.glob("val.*"):
        path.unlink()
    command = training_command(folder, other, 2, *LEARNED, "--resume")
    assert "val files were taken away" in refused(capsys, *command)
    assert run(capsys, *training_command(folder, out, 2, *LEARNED,
                                         "--resume"))[0] == 0  # fmt: skip


def test_a_held_out_line_that_changed_is_named_with_its_file(
    folder, tmp_path, capsys
):
    for path in folder.glob("val.*"):
        path.unlink()
    out = trained(folder, tmp_path / "out", 1, *LEARNED)
    path = folder / "train.en"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[0] += " changed"  # the first is held out
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    command = training_command(folder, out, 2, *LEARNED, "--resume")
    message = refused(capsys, *command)
    assert "held out of train.en)" in message and "val." not in message


def test_copies_are_counted_in_the_validation_text_of_now(
    folder, tmp_path, monkeypatch, capsys
):
    """Though what was encoded before is found again."""
    copied = [(f"ein langes Wort {n:040}", f"a long word {n}") for n in "123"]
    for language, side in zip(("de", "en"), zip(*copied)):
        path = folder / f"train.{language}"
        text = path.read_text(encoding="utf-8")
        path.write_text(text + "\n".join(side) + "\n", encoding="utf-8")
    told, encoded = [], []
    real = book.pack
    monkeypatch.setattr(
        book, "pack", lambda *a, **k: encoded.append(1) or real(*a, **k)
    )
    for number, val in enumerate((copied[:2], copied[1:2], [("ja", "yes")])):
        write(folder, "val", val)
        capsys.readouterr()
        trained_here = [*LEARNED, "--cache", tmp_path / "cache"]
        command = training_command(
            folder, tmp_path / f"{number}", 1, *trained_here
        )
        status, said = book.main([*map(str, command)]), capsys.readouterr().err
        assert status == 0, said
        told.append([n for n in "123" if f"{n} of the training pairs" in said])
    assert told == [["2"], ["1"], []] and len(encoded) == 1


def test_texts_are_known_by_one_digest(folder):
    """That of all pairs as JSON, by which older checkpoints know theirs."""
    pairs = [(f"eins {n} \u00e4", f"one {n}") for n in range(10_007)]
    write(folder, "train", [*pairs, ("", "left out")])
    texts, _ = book.training_pairs(folder, "de", "en")
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    facts = {"pairs": 10_007, "empty": 1, "data": digest}
    assert texts.facts == facts


def test_with_bpe_dropout_a_change_between_epochs_is_noticed(
    folder, tmp_path, pieces
):
    texts, _ = book.training_pairs(folder, "de", "en")
    corpus, translator = (
        book.EncodedCorpus(texts, tmp_path / "pairs.pt"), coder(pieces)
    )  # fmt: skip
    pairs = corpus.pairs(translator)
    cut = book.random_cuts(pieces, 0.1, random.Random(0))
    assert len(pairs.anew(translator, cut)) == len(pairs) == 300
    exchange(folder / "train.de", b"e", b"a")
    with pytest.raises(InputError, match="changed") as caught:
        pairs.anew(translator, cut)
    named = f"{folder}: train.de changed while it was read; "
    assert named in str(caught.value) and "--resume" in str(caught.value)


def test_a_change_while_it_is_encoded_is_noticed(
    folder, tmp_path, pieces, monkeypatch
):
    """As when train.de is still being copied: else the digests are wrong."""
    texts, _ = book.training_pairs(folder, "de", "en")
    corpus = book.EncodedCorpus(texts, tmp_path / "pairs.pt")
    encode = book.encode_portion

    def slow(*arguments):
        exchange(folder / "train.de", b"e", b"a")
        return encode(*arguments)

    monkeypatch.setattr(book, "encode_portion", slow)
    with pytest.raises(InputError, match="train.de changed while it was"):
        corpus.pairs(coder(pieces))
    assert not (tmp_path / "pairs.pt").exists()


def test_what_was_too_long_stays_out_in_every_epoch(pieces):
    texts = [PAIRS[0], ("Hund " * 101, "dog"), PAIRS[1]]
    packed, draw = book.pack(coder(pieces), texts), random.Random(0)
    assert (len(packed), packed.long) == (2, [1])
    again = packed.anew(coder(pieces), book.random_cuts(pieces, 0.5, draw))
    for pair, (src, tgt) in zip((PAIRS[0], PAIRS[1]), again, strict=True):
        sides = src[:-1], tgt[1:-1]
        assert tuple(pieces.join(pieces.decode(s)) for s in sides) == pair


# -------------------------------------------------------- killed, or damaged

DIES = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import annotated_transformer as book
sizes = dict(N=1, d_model=16, d_ff=16, h=2, dropout=0.1)
book.PRESETS["tiny"] = sizes
portions, encode, done = book.portions, book.encode_portion, []
book.portions = lambda items: portions(items, 100)

def mortal(*arguments):
    done.append(1)
    if len(done) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(*arguments)

book.encode_portion = mortal
book.main(sys.argv[2:])
"""


@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_killed_while_encoding_it_leaves_nothing(folder, tmp_path):
    out = tmp_path / "out"
    command = training_command(folder, out, 1, *LEARNED)
    died = subprocess.run(
        [sys.executable, "-c", DIES, SCRIPT.parent, *map(str, command)],
        env=ONE_THREAD, capture_output=True,
    )  # fmt: skip
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()
    assert list(out.iterdir()) == []
    trained(folder, out, 1, *LEARNED)
    whole = trained(folder, tmp_path / "whole", 1, *LEARNED)
    assert same(checkpoint(out), checkpoint(whole))


@pytest.mark.parametrize("content", ["tensors", "an object", "text"])
def test_a_file_of_something_else_stays(capsys, folder, tmp_path, content):
    out = tmp_path / "out"
    out.mkdir()
    path = out / "pairs.pt"
    if content == "text":
        path.write_text("my pairs", encoding="utf-8")
    else:
        mine = torch.ones(3) if content == "tensors" else random.Random()
        torch.save({"mine": mine}, path)
    before = contents(out)
    message = refused(capsys, *training_command(folder, out, 1, *LEARNED))
    assert str(path) in message and "something else" in message
    assert contents(out) == before


@pytest.mark.parametrize("damage", ["cut off", "empty", "other", "shorter"])
def test_a_damaged_file_is_made_anew(folder, tmp_path, damage):
    whole = trained(folder, tmp_path / "whole", 4, *LEARNED)
    out = trained(folder, tmp_path / "out", 2, *LEARNED)
    path = out / "pairs.pt"
    content = path.read_bytes()
    if damage == "shorter":
        stored = torch.load(path, weights_only=True)
        stored["lengths"] = stored["lengths"][:-1]
        torch.save(stored, path)
    elif damage == "other":
        torch.save({"facts": "{}"}, path)
    else:
        path.write_bytes(content[: 5000 * (damage == "cut off")])
    trained(folder, out, 4, *LEARNED, "--resume")
    assert same(checkpoint(out), checkpoint(whole))
    again = torch.load(path, weights_only=True)
    assert same(again, torch.load(whole / "pairs.pt", weights_only=True))


# ----------------------------------------------------------------- the memory

HUNGRY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import annotated_transformer as book

def peak():  # of this process; ru_maxrss begins with that of its parent
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1000

folder = Path(sys.argv[2])
pieces = book.Pieces((folder / "pieces.model").read_bytes())
translator = book.Translator(None, [pieces] * 2, ("de", "en"))
first = book.pack(translator, [("Hund", "dog")])
next(book.stream(first, 4096))
before = peak()
texts, _ = book.training_pairs(folder, "de", "en")
pairs = book.EncodedCorpus(texts, folder / "pairs.pt").pairs(translator)
next(book.stream(pairs, 4096))
print(len(pairs), len(pairs.tokens), peak() - before)
assert str(folder / "pairs.pt") in Path("/proc/self/maps").read_text()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_a_corpus_need_not_fit_into_memory(folder):
    """As lists, these pairs take over 100 MB; 10,000 of them, a quarter."""
    with open("/proc/self/status") as file:
        told = "VmHWM:" in file.read()
    if not told:
        pytest.skip("a sandbox that does not tell the most that was taken")
    texts = itertools.chain.from_iterable(PAIRS)
    pieces = book.Pieces.learn(texts, 500)
    (folder / "pieces.model").write_bytes(pieces.model)
    pairs = [(f"{de} {de} {de}", f"{en} {en} {en}") for de, en in PAIRS]
    write(folder, "train", pairs * 134)
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, SCRIPT.parent, folder],
        env=ONE_THREAD, capture_output=True, text=True, check=True,
    )  # fmt: skip
    number, tokens, grown = map(float, done.stdout.split())
    assert number == 134 * 300 and tokens > 70 * number
    assert grown < 70


# ------------------------------------------------------- what is said of them


def test_signs_without_a_piece_are_named_and_counted(folder, tmp_path, capsys):
    """By a run that begins from a model, whose pieces do not know them."""
    begun = trained(folder, tmp_path / "begun", 1, *LEARNED)
    write(folder, "train", [(f"{de} \u2660", en) for de, en in PAIRS])
    command = ["train", "--corpus", folder, "--steps", 2, "--device", "cpu"]
    command += ["--from", begun, "--out", tmp_path / "out"]
    status, _, said = run(capsys, *command)
    assert status == 0
    assert "not in the vocabulary, in 300 places: \u2660 (" in said
    command[command.index("--steps") + 1] = 3  # found as it was encoded
    status, _, said = run(capsys, *command, "--resume")
    assert status == 0 and "encoded before" in said
    assert "not in the vocabulary, in 300 places: \u2660 (" in said
    new = training_command(folder, tmp_path / "new", 1, *LEARNED)
    assert "not in the vocabulary" not in run(capsys, *new)[2]


@pytest.mark.parametrize("both", [[], ["--both"]])
def test_the_number_of_epochs_is_said(folder, tmp_path, capsys, both):
    """So that nobody trains a large corpus for a part of an epoch."""
    how = [*LEARNED, *both, "--batch-tokens", 500, "--max-tokens", 500]
    command = training_command(folder, tmp_path / "out", 20, *how)
    status, _, said = run(capsys, *command)
    assert status == 0
    [epochs] = re.findall(r"20 updates: about ([\d.]+) epochs", said)
    stored = torch.load(tmp_path / "out" / "pairs.pt", weights_only=True)
    src, tgt = stored["lengths"].unbind(1)
    places = int(torch.maximum(src, tgt - 1).sum())
    if both:
        places += int(torch.maximum(tgt, src - 1).sum())
    assert float(epochs) == pytest.approx(20 * 500 / places, rel=0.06)
    assert "note: an update" not in said


def test_an_update_of_other_size_than_asked_for_is_said(
    folder, tmp_path, capsys
):
    """Parts are whole: 700 places are one part of 500, and so 500."""
    said = []
    for number, batch in enumerate((700, 500)):
        how = [*LEARNED, "--batch-tokens", batch, "--max-tokens", 500]
        command = training_command(folder, tmp_path / f"{number}", 20, *how)
        said.append(run(capsys, *command)[2])
    assert "an update has 500 places, not 700" in said[0]
    epochs = [re.findall(r"about ([\d.]+) epochs", text) for text in said]
    assert epochs[0] == epochs[1] and len(epochs[0]) == 1


def test_a_corpus_is_found_again_whatever_kind_its_facts_are(
    folder, tmp_path, pieces
):
    texts, _ = book.training_pairs(folder, "de", "en")
    facts, path = {"languages": ("de", "en"), "held": 0}, tmp_path / "pairs.pt"
    first = book.EncodedCorpus(texts, str(path), **facts)
    first.pairs(coder(pieces))
    again = book.EncodedCorpus(texts, str(path), **facts)
    assert again.stored and again.changed == []


def test_lists_of_unequal_length_are_refused_as_files_are():
    texts = book.Texts("mine", (["a", "b"], ["c"]))
    with pytest.raises(InputError, match="2 and 1 lines"):
        len(texts)
    with pytest.raises(InputError, match="no pair of sentences"):
        len(book.Texts("mine", (["a"], [""])))
