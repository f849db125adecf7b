"""The command line does what --help says, and says what is wrong."""

import contextlib
import io
import itertools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from helpers import (
    ONE_THREAD,
    SCRIPT,
    checkpoint,
    contents,
    fresh,
    little_room,
    needed,
    refused,
    run,
    same,
    started_from,
    trained,
    training_command,
    weights,
    writers_made,
)
from sacrebleu.metrics import CHRF

import annotated_transformer as book

pytestmark = pytest.mark.usefixtures("one_thread")
COMMANDS = ["copy", "train", "translate", "evaluate", "average",
            "diversify", "curves", "export", "claims"]  # fmt: skip


# ------------------------------------------------------------------- two runs


@pytest.fixture(scope="module", autouse=True)
def smaller():
    """Make the preset tiny smaller, for runs in this process."""
    sizes = dict(N=2, d_model=64, d_ff=64, h=4, dropout=0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(book.PRESETS, "tiny", sizes)
        yield


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory):
    """The folder of a model after six updates; not to be written to."""
    out = tmp_path_factory.mktemp("runs") / "six"
    return trained(corpus, out, 6, "--save-every", 3)


@pytest.fixture(scope="module")
def half(corpus, tmp_path_factory):
    """The folder of the same run after three updates; copy it first."""
    return trained(corpus, tmp_path_factory.mktemp("runs") / "three", 3)


def untrained(folder, corpus, languages, seed):
    """Save a very small model with random weights; returns its folder."""
    pairs, _ = book.training_pairs(corpus, *languages)
    torch.manual_seed(seed)
    sizes = dict(N=1, d_model=16, d_ff=16, h=2)
    translator = book.untrained_translator(pairs, languages, sizes)
    book.save_translator(translator, folder)
    return folder


@pytest.fixture(scope="module")
def small(corpus, tmp_path_factory):
    """The folder of a very small model that nobody trained: a quick one."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    return untrained(folder, corpus, ("de", "en"), seed=0)


@pytest.fixture
def own(half, tmp_path):
    """A copy of the interrupted run, to be changed at will."""
    return Path(shutil.copytree(half, tmp_path / "own"))


# --------------------------------------------------------------- in a notebook


def in_a_kernel(*cells):
    """What each cell of a notebook shows after the book's definitions: dicts.

    The book's examples do not run: the name that lets them is set last.
    """
    source = SCRIPT.read_text(encoding="utf-8")
    for old, new in {
        '\nNOTEBOOK = __name__ == "__main__" and ': "\nNOTEBOOK = False and ",
        "hidden=NOTEBOOK": "hidden=True",
        "\nstart(main)\n": "\nNOTEBOOK = True\n",
    }.items():
        assert source.count(old) == 1
        source = source.replace(old, new)
    define = f"exec(compile({source!r}, 'book', 'exec'), globals())"
    cells = map(nbformat.v4.new_code_cell, [define, *cells])
    nb = nbformat.v4.new_notebook(cells=[*cells])
    nbclient.NotebookClient(nb, timeout=120).execute()
    shown = []
    for cell in nb.cells[1:]:
        shown.append(dict(stdout="", stderr="", value=""))
        for output in cell.outputs:
            if output.output_type == "stream":
                shown[-1][output.name] += output.text
            else:
                shown[-1]["value"] += output.data["text/plain"]
    return shown


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_a_gpu_without_units_for_16_bits_is_told(
    capsys, monkeypatch, capability
):
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capability
    )
    config = book.tiny_model().config
    for half in (True, False):
        recipe = book.Recipe(half=half)
        book.tell_recipe(recipe, config, False, torch.device("cuda"))
        told = "no units for bfloat16" in capsys.readouterr().err
        assert told == (half and capability < (8, 0))


def test_a_notebook_gives_commands_to_main(few, tmp_path):
    out = str(tmp_path / "run")
    train = [*map(str, training_command(few, out, 2))]
    given = [
        train, ["translate", "--model", out, "Ein Hund"],
        ["translate", "--model", "nowhere", "Ein Hund"],
        ["train", "--help"], ["train", "--corpus", "toy"],
        ["translate", "--model", out],
    ]  # fmt: skip
    given[0] = shlex.join(given[0])  # a list, or in one text
    shown = in_a_kernel(*(f"main({words!r})" for words in given))
    assert [cell["value"] for cell in shown] == [*"002022"]
    trained, translated, refused, helped, wrong, silent = shown
    assert "training: 100%" in trained["stderr"]  # it has a bar
    assert f"done: {out}" in trained["stderr"]
    assert translated["stdout"].count("\n") == 1
    assert "nowhere" in refused["stderr"]
    assert "--corpus CORPUS" in helped["stdout"] and not helped["stderr"]
    assert "required: --out" in wrong["stderr"]
    assert "give the sentences" in silent["stderr"]


def test_a_quotation_that_does_not_end_is_told(capsys):
    for words in ("translate L'homme dort", 'translate "Ein Hund'):
        assert book.main(words) == 2
        said = capsys.readouterr().err
        assert "No closing quotation" in said and "double" in said


# ----------------------------------------------------------------------- help


def helped(capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        book.main([*arguments, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_help_lists_every_command(capsys):
    listed = re.findall(r"^    (\w+)\b", helped(capsys), re.M)
    assert listed == COMMANDS


OPTIONS = {
    "copy": "--device --seed",
    "train": "--device --corpus --src --tgt --preset --out --steps --seed "
    "--cache --from --compile --record "
    "--layers --d-model --d-ff --heads "
    "--pieces --warmup --factor --batch-tokens --max-tokens --average "
    "--tensorboard "
    "--norm-first --dropout --attention-dropout --decay --ema --r-drop "
    "--bpe-dropout --both --lowercase --half --onednn --save-every "
    "--resume",
    "translate": "--device --model --beam --alpha --reverse --int8 --half "
    "--back --back-weight --vote --vote-power --nbest sentence",
    "evaluate": "--device --model --beam --alpha --reverse --int8 --half "
    "--back --back-weight --vote --vote-power --show --outputs --json "
    "--corpus --split",
    "average": "--model --out",
    "diversify": "--device --corpus --src --tgt --model --out --beam --alpha "
    "--closest",
    "curves": "--model --out",
    "export": "--format --model --out --quantization",
    "claims": "--full --out --resume --commit names",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_names_its_options(capsys, command):
    text = helped(capsys, command)
    assert text.startswith(f"usage: {SCRIPT.name} {command}")
    named = set(re.findall(r"^  (--[a-z0-9-]+|[a-z]+)\b", text, re.M))
    assert named - {"-h"} == set(OPTIONS[command].split())


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["dance"], "dance"),
        (["train", "--out", "x"], "--corpus"),
        (["train", "--corpus", "toy"], "--out"),
        (["train", "--corpus", "toy", "--out", "x", "--preset", "huge"],
         "tiny"),
        (["train", "--corpus", "toy", "--out", "x", "--steps", "ten"], "ten"),
        (["translate", "Hallo"], "--model"),
        (["evaluate", "--model", "x"], "--corpus"),
    ],
)  # fmt: skip
def test_what_the_command_line_lacks_is_named(capsys, arguments, named):
    with pytest.raises(SystemExit) as ended:
        book.main(arguments)
    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert named in shown.err and shown.out == ""


# ------------------------------------------------------------ what is written

ROOT = SCRIPT.parent
WRITTEN = [ROOT / "README.md", *sorted(ROOT.glob("results/*/README.md"))]


def understood(command):
    """The options of a command, as it is written somewhere."""
    words = command.partition("annotated_transformer.py")[2]
    words = re.split(r" [<>|] ", words)[0]
    return book.parser().parse_args(shlex.split(words, comments=True))


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.parent.name)
def test_each_command_that_is_written_is_understood(path):
    text = path.read_text("utf-8").replace("\\\n", " ")
    commands = re.findall(
        r"^(?:\$ )?(?:python|torchrun)\b.*annotated_transformer\.py.*$",
        text, re.M,
    )  # fmt: skip
    assert len(commands) > 2
    for command in commands:
        understood(command)


def test_each_command_in_the_book_and_of_the_benchmarks_is_understood():
    """But for those of which only a part is shown, with dots."""
    prose = re.sub(r"(?m)^# ?", "", SCRIPT.read_text("utf-8"))
    speed = (ROOT / "benchmarks/README.md").read_text("utf-8")
    found = re.findall(
        r"`((?:python|torchrun)\s[^`]*annotated_transformer\.py[^`]*)`",
        f"{prose} {speed}",
    )
    whole = [" ".join(c.split()) for c in found if "…" not in c]
    whole = [command for command in whole if "--help" not in command]
    assert len(whole) > 10
    for command in whole:
        understood(command)


def test_what_the_readme_shows_of_real_captions_is_what_comes_out(data):
    text = (ROOT / "README.md").read_text("utf-8")
    command, shown = re.search(
        r"^\$ python ([^\n]+ --show 5)\n(.+?)\n\n\.\.\.", text, re.M | re.S
    ).groups()
    args = understood(command)
    pairs = book.corpus_part(data / args.corpus, args.split, "de", "en")[:5]
    sources = [source for source, _ in pairs]
    translator = book.load_translator(ROOT / args.model)
    outputs = translator.translate(sources, args.beam, args.alpha)
    lines = [
        f"source     {source}\nreference  {reference}\noutput     {output}"
        for (source, reference), output in zip(pairs, outputs)
    ]
    assert shown == "\n\n".join(lines)


def test_the_command_of_each_result_is_understood():
    paths = sorted((ROOT / "results").glob("multi30k-*.json"))
    for path in paths:
        facts = json.loads(path.read_text("utf-8"))
        args = understood(facts["command"])
        assert args.run in (book.run_train, book.run_average), path
    assert len(paths) > 20


@pytest.mark.parametrize(
    "preset, steps, warmup, places, pieces",
    [
        ("laptop", 20_000, 300, 1024, 5000),
        ("tiny", 5000, 2000, 4096, 5000),
        ("base", 100_000, 4000, 25_000, 37_000),
        ("big", 300_000, 4000, 25_000, 37_000),
    ],
)
def test_a_preset_is_what_is_said_of_it(preset, steps, warmup, places, pieces):
    """And levers that the paper lacks are off."""
    args = understood(
        f"annotated_transformer.py train --corpus x --out y --preset {preset} "
        "--no-half --no-onednn"
    )
    recipe, sizes, number = book.settings_of(args)
    assert (recipe.steps, recipe.warmup) == (steps, warmup)
    assert (recipe.batch_tokens, number) == (places, pieces)
    assert recipe.r_drop == recipe.bpe_dropout == 0
    assert not args.both and not args.lowercase
    assert book.Config(2, 2, **sizes).attention_dropout == 0
    assert book.averaged(args) == (20 if preset == "big" else 5)
    if preset == "laptop":
        assert recipe.decay == "linear" and sizes["norm_first"]
    else:
        assert recipe.ema == 0 and recipe.decay != "linear"
        assert not sizes.get("norm_first")
    if preset in ("base", "big"):
        assert recipe.factor == 1 and recipe.smoothing == 0.1


# ------------------------------------------------------------------- the copy


@pytest.mark.slow
def test_another_seed_copies_too():
    _, losses, right = book.train_copy(1)
    assert right == 1000 and len(losses) <= 600


@pytest.mark.slow
def test_the_script_alone_learns_to_copy(tmp_path):
    done = fresh(cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    source, output, score = done.stdout.decode().splitlines()
    assert source.split() == ["source", *"31415926"]
    assert output.split() == ["output", *"31415926"]
    assert re.fullmatch(r"exact match: 1000/1000 after \d+ updates", score)
    assert b"device: " in done.stderr
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------- the import

WATCH = """
import os, random, sys
import torch

writes, torch_state = [], torch.get_rng_state()
python_state = random.getstate()

def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if set(mode or "") & set("wax+") or flags & (os.O_WRONLY | os.O_RDWR):
            writes.append(f"open {path}")
    if event in ("socket.connect", "socket.bind", "subprocess.Popen",
                 "os.mkdir", "os.system"):
        writes.append(f"{event} {arguments}")

before = set(sys.modules)
sys.addaudithook(watch)
import annotated_transformer

assert not writes, writes
late = set("altair pandas spacy torchtext GPUtil sacrebleu tqdm".split())
assert not late & (set(sys.modules) - before)
assert torch.get_rng_state().equal(torch_state)
assert random.getstate() == python_state
"""


def test_import_is_silent_and_changes_nothing(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", WATCH],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------- training


def test_training_reports_beside_the_output(capsys, corpus, tmp_path):
    out = tmp_path / "new" / "folder"
    arguments = training_command(corpus, out, 2, "--save-every", 1)
    status, output, errors = run(capsys, *arguments)
    assert (status, output) == (0, "")
    for expected in (
        "device: cpu",
        "700 training pairs, 3 for validation",
        "million weights",
        "update 1: validation BLEU",
        "update 2: validation BLEU",
        "source     ",
        "reference  ",
        f"done: {out}",
    ):
        assert expected in errors
    assert sorted(contents(out)) == [
        "checkpoint.pt", "log.jsonl", "model.json", "pairs.pt",
        "weights-000001.pt", "weights-000002.pt", "weights.pt",
    ]  # fmt: skip


def test_files_of_a_model_cannot_run_code(model):
    files = sorted(model.glob("*.pt"))
    names = [path.name for path in files]
    assert names == [
        "checkpoint.pt", "pairs.pt", "weights-000003.pt",
        "weights-000006.pt", "weights.pt",
    ]  # fmt: skip
    for path in files:
        torch.load(path, weights_only=True)
    facts = json.loads((model / "model.json").read_text(encoding="utf-8"))
    assert facts["step"] in (3, 6)  # that of the best validation
    assert facts["languages"] == ["de", "en"]


def test_the_same_command_makes_the_same_weights(half, corpus, tmp_path):
    again = trained(corpus, tmp_path / "again", 3)
    assert same(checkpoint(again), checkpoint(half))
    assert same(weights(again), weights(half))


def test_another_seed_makes_other_first_weights(corpus, tmp_path):
    """Not only another order of the batches: at this rate nothing moves."""
    still = ["--factor", 1e-9]
    first, again, other = (
        weights(trained(corpus, tmp_path / name, 1, *still, "--seed", seed))
        for name, seed in (("first", 0), ("again", 0), ("other", 5))
    )
    name = "src_embedding.weight"
    torch.testing.assert_close(again[name], first[name], rtol=0, atol=1e-6)
    assert (other[name] - first[name]).abs().mean() > 0.01


def test_a_resumed_run_equals_an_uninterrupted_one(capsys, own, corpus, model):
    assert not same(checkpoint(own), checkpoint(model))
    arguments = training_command(corpus, own, 6, "--resume")
    status, _, errors = run(capsys, *arguments)
    assert status == 0 and "resuming after update 3" in errors
    assert same(checkpoint(own), checkpoint(model))
    assert same(weights(own), weights(model))


@pytest.mark.parametrize("pays", [True, False])
def test_laptop_halves_products_where_it_pays_and_keeps_to_it(
    corpus, tmp_path, monkeypatch, pays
):
    """Resumed elsewhere, a run goes on with the kind it began with."""
    out = tmp_path / "run"
    laptop = ["--preset", "laptop", "--decay", "root"]
    monkeypatch.setattr(book, "half_pays", lambda *_: pays)
    trained(corpus, out, 1, *laptop)
    monkeypatch.setattr(book, "half_pays", lambda *_: not pays)
    trained(corpus, out, 2, *laptop, "--resume")
    assert book.load_description(out)["recipe"]["half"] is pays
    other = trained(corpus, tmp_path / "other", 2, *laptop)
    assert book.load_description(other)["recipe"]["half"] is not pays
    assert not same(weights(out), weights(other))


def test_what_is_not_said_is_what_help_says():
    read = book.parser().parse_args
    train = read(["train", "--corpus", "toy", "--out", "x", "--no-onednn"])
    assert (train.save_every, train.preset) == (1000, "tiny")
    assert book.averaged(train) == 5
    assert (train.src, train.tgt, train.seed) == ("de", "en", 0)
    recipe, sizes, pieces = book.settings_of(train)
    for name, value in book.TOY_RECIPE.items():
        assert getattr(recipe, name) == value
    assert (pieces, sizes["dropout"]) == (0, book.TOY["dropout"])
    write = read(["translate", "--model", "x"])
    assert (write.beam, write.alpha, write.nbest) == (4, 0.6, 0)


def test_what_is_asked_for_comes_before_what_pays(monkeypatch):
    """--onednn is of products in 32 bits; but --half beside it is obeyed."""
    monkeypatch.setattr(book, "half_pays", lambda *_: True)
    command = ["train", "--corpus", "x", "--out", "new", "--preset", "laptop"]

    def products(*more):
        args = book.parser().parse_args([*command, *more])
        recipe = book.settings_of(args)[0]
        return recipe.half, recipe.onednn

    assert products() == products("--no-onednn") == (True, False)
    assert products("--onednn") == (False, True)
    assert products("--half", "--onednn") == (True, False)


def test_a_resumed_run_keeps_its_size_of_batches(tmp_path):
    """The default depends on the number of processes, which may change."""
    command = ["train", "--corpus", "x", "--out", str(tmp_path), "--resume"]
    command += ["--preset", "base", "--no-onednn"]

    def size(*more):
        args = book.parser().parse_args([*command, *more])
        return book.settings_of(args)[0].max_tokens

    assert size() == 4096
    described = json.dumps({"recipe": {"max_tokens": 16_384}})
    torch.save({"description": described}, tmp_path / "checkpoint.pt")
    assert size() == 16_384 and size("--max-tokens", "5000") == 5000
    torch.save({"description": "{}"}, tmp_path / "checkpoint.pt")
    assert size() == 4096  # that of an older run: `Run.load` compares


@pytest.mark.parametrize("pays", [True, False])
def test_a_run_asks_onednn_where_it_pays_and_keeps_to_it(
    corpus, tmp_path, monkeypatch, capsys, pays
):
    """And an older run, which did not know the choice, goes on without."""
    out = tmp_path / "run"
    monkeypatch.setattr(book, "onednn_pays", lambda device: pays)

    def free(steps, *more):
        command = training_command(corpus, out, steps, *more)
        command.remove("--no-onednn")
        status, _, errors = run(capsys, *command)
        assert status == 0
        return errors

    assert (", by oneDNN" in free(1)) is pays
    monkeypatch.setattr(book, "onednn_pays", lambda device: not pays)
    free(2, "--resume")
    assert book.load_description(out)["recipe"]["onednn"] is pays
    for option, chosen in (("--onednn", True), ("--no-onednn", False)):
        other = trained(corpus, tmp_path / option, 1, option)
        assert book.load_description(other)["recipe"]["onednn"] is chosen
    half = trained(corpus, tmp_path / "half", 1, "--half", "--onednn")
    assert book.load_description(half)["recipe"]["onednn"] is False
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    description = json.loads(state["description"])
    del description["recipe"]["onednn"]
    state["description"] = json.dumps(description)
    torch.save(state, out / "checkpoint.pt")
    free(3, "--resume")
    assert book.load_description(out)["recipe"]["onednn"] is False


def test_resuming_a_run_that_is_done_changes_no_weight(
    capsys, own, corpus, half
):
    arguments = training_command(corpus, own, 3, "--resume")
    status, _, errors = run(capsys, *arguments)
    assert status == 0 and "no updates are left, --steps is 3" in errors
    assert same(checkpoint(own), checkpoint(half))
    assert same(weights(own), weights(half))


def start_command(corpus, out, start, *more):
    return [
        "train", "--corpus", corpus, "--out", out, "--steps", 1,
        "--device", "cpu", *(["--from", start] if start else []), *more,
    ]  # fmt: skip


def test_a_run_starts_from_the_weights_of_another(
    capsys, corpus, small, tmp_path
):
    out = tmp_path / "out"
    command = start_command(corpus, out, small, "--factor", 1e-9)
    status, _, errors = run(capsys, *command)
    assert status == 0, errors
    old, new = (weights(folder) for folder in (small, out))
    assert list(old) == list(new)
    for name, weight in new.items():
        torch.testing.assert_close(weight, old[name], rtol=0, atol=1e-6)
    words = [book.load_description(f)["src_words"] for f in (small, out)]
    assert words[0] == words[1]


@pytest.mark.parametrize(
    "preset, others", [("tiny", {}), ("laptop", book.LAPTOP)]
)
def test_sizes_may_be_given_instead_of_the_presets(
    capsys, corpus, tmp_path, preset, others
):
    sizes = dict(N=1, d_model=24, d_ff=40, h=3)
    options = "--layers", 1, "--d-model", 24, "--d-ff", 40, "--heads", 3
    out = tmp_path / "out"
    how = "--preset", preset, "--pieces", 150
    command = start_command(corpus, out, None, *how, *options)
    status, _, errors = run(capsys, *command)
    assert status == 0, errors
    assert f"{preset} with N=1, d_model=24, d_ff=40, h=3: 0.0 mill" in errors
    config = book.asdict(book.load_translator(out).model.config)
    expected = book.PRESETS["tiny"] | others | sizes
    assert {name: config[name] for name in expected} == expected


def test_one_size_leaves_the_others(corpus, tmp_path):
    out = trained(corpus, tmp_path / "out", 1, "--layers", 1)
    config = book.load_translator(out).model.config
    plain = trained(corpus, tmp_path / "plain", 1)
    assert config == book.replace(
        book.load_translator(plain).model.config, N=1
    )


@pytest.mark.parametrize(
    "sizes, named",
    [
        (["--heads", 3], "d_model=64 is not divisible by h=3"),
        (["--d-model", 63, "--heads", 1], "d_model=63 must be even"),
        (["--layers", 0], "--layers must be at least 1"),
        (["--d-ff", -1], "--d-ff must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_first(
    capsys, corpus, tmp_path, sizes, named
):
    out = tmp_path / "out"
    assert named in refused(capsys, *start_command(corpus, out, None, *sizes))
    assert not out.exists()


def test_a_run_from_a_model_may_have_another_dropout(
    capsys, corpus, small, tmp_path
):
    rates = {"dropout": 0.25, "attention_dropout": 0.125}
    more = ["--dropout", 0.25, "--attention-dropout", 0.125]
    command = start_command(corpus, tmp_path / "out", small, *more)
    assert run(capsys, *command)[0] == 0
    config = book.load_translator(tmp_path / "out").model.config
    assert {name: getattr(config, name) for name in rates} == rates
    old = book.load_translator(small).model.config
    assert config == book.replace(old, **rates)


def test_a_run_from_a_model_is_resumed_from_that_model_only(
    capsys, corpus, small, tmp_path
):
    out = tmp_path / "out"
    assert run(capsys, *start_command(corpus, out, small))[0] == 0
    before = contents(out)
    other = tmp_path / "other"
    shutil.copytree(small, other)
    changed = weights(small)
    next(iter(changed.values())).add_(1)
    torch.save(changed, other / "weights.pt")
    message = refused(capsys, *start_command(corpus, out, other, "--resume"))
    assert f"{out}: " in message and "from the weights of a model" in message
    assert contents(out) == before
    without = start_command(corpus, out, None, "--pieces", 0, "--resume")
    assert "name it by --from" in refused(capsys, *without)
    assert contents(out) == before
    assert run(capsys, *start_command(corpus, out, small, "--resume"))[0] == 0


def test_a_run_from_random_weights_is_not_resumed_from_a_model(
    capsys, own, corpus, small
):
    before = contents(own)
    command = training_command(corpus, own, 6, "--resume")
    message = refused(capsys, *started_from(small, command))
    assert "began without --from" in message and contents(own) == before


def test_words_of_a_model_are_not_cut_by_bpe_dropout(
    capsys, corpus, small, tmp_path
):
    out = tmp_path / "out"
    command = start_command(corpus, out, small, "--bpe-dropout", 0.1)
    message = refused(capsys, *command)
    assert "--bpe-dropout" in message and str(small) in message
    assert not out.exists()


def test_pieces_of_a_model_are_cut_whatever_the_corpus_had(
    capsys, monkeypatch, tmp_path
):
    """The generated corpus has whole words; --from a model of pieces not."""
    few = {part: pairs[:300] for part, pairs in book.toy_corpus().items()}
    monkeypatch.setattr(book, "toy_corpus", lambda: few)
    pieces = tmp_path / "pieces"
    command = [
        "train", "--corpus", "toy", "--out", pieces, "--steps", 1,
        "--pieces", 200, "--device", "cpu",
    ]  # fmt: skip
    assert run(capsys, *command)[0] == 0
    more = "--bpe-dropout", 0.1
    out = tmp_path / "out"
    status, _, errors = run(capsys, *start_command("toy", out, pieces, *more))
    assert status == 0, errors


@pytest.mark.parametrize(
    "more, named",
    [
        (["--pieces", 50], "--pieces is the model's own"),
        (["--norm-first"], "--norm-first is the model's own"),
        (["--layers", 1], "--layers is the model's own"),
        (["--d-model", 64], "--d-model is the model's own"),
        (["--d-ff", 64], "--d-ff is the model's own"),
        (["--heads", 4], "--heads is the model's own"),
        (["--src", "en", "--tgt", "de"], "de to en, one way"),
        (["--both"], "de to en, one way"),
    ],
)
def test_what_the_model_has_is_not_chosen_anew(
    capsys, corpus, small, tmp_path, more, named
):
    out = tmp_path / "out"
    message = refused(capsys, *start_command(corpus, out, small, *more))
    assert named in message
    assert not out.exists()


@pytest.fixture(scope="module")
def both(corpus, tmp_path_factory):
    """The folder of a model of both directions."""
    out = tmp_path_factory.mktemp("both") / "run"
    more = "--both", "--pieces", 150
    assert (
        book.main(list(map(str, start_command(corpus, out, None, *more)))) == 0
    )
    return out


@pytest.mark.parametrize(
    "src, tgt, more, tag",
    [
        ("de", "en", [], []),
        ("en", "de", [], []),
        ("de", "en", ["--both"], ["<2en>"]),
        ("en", "de", ["--both"], ["<2de>"]),
    ],
)
def test_a_model_of_both_directions_goes_on_in_either(
    capsys, corpus, both, tmp_path, src, tgt, more, tag
):
    """Its pieces and weights, without tags; with --both, with them."""
    out = tmp_path / "out"
    more = [*more, "--src", src, "--tgt", tgt, "--factor", 1e-9]
    status, _, errors = run(capsys, *start_command(corpus, out, both, *more))
    assert status == 0, errors
    model = book.load_translator(out)
    assert (model.src, model.tgt) == (src, tgt)
    assert model.split("der Hund") == tag + model.src_vocab.split("der Hund")
    new, old = weights(out), weights(both)
    assert list(new) == list(old)
    for name, weight in new.items():
        torch.testing.assert_close(weight, old[name], rtol=0, atol=1e-6)
    pieces = [folder / "pieces.model" for folder in (out, both)]
    assert pieces[0].read_bytes() == pieces[1].read_bytes()
    assert model.model.config == book.load_translator(both).model.config


def test_a_model_of_both_directions_knows_no_third_language(
    capsys, corpus, both, tmp_path
):
    out, more = tmp_path / "out", Path(shutil.copytree(corpus, tmp_path / "c"))
    for file in more.glob("*.en"):
        file.rename(file.with_suffix(".fr"))
    command = start_command(more, out, both, "--tgt", "fr")
    message = refused(capsys, *command)
    assert "de to en, both ways" in message and not out.exists()


def test_ctrl_c_is_no_crash(capsys, corpus, tmp_path, monkeypatch):
    def pressed(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(book, "training_pairs", pressed)
    arguments = training_command(corpus, tmp_path / "out", 3)
    status, _, errors = run(capsys, *arguments)
    assert status == 128 + signal.SIGINT
    assert "--resume" in errors and "Traceback" not in errors


# ---------------------------------------------------------------- translating


@pytest.fixture
def standard_input(monkeypatch):
    """A function that makes its bytes the standard input."""

    def put(content):
        stream = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stream)

    return put


def translate(capsys, model, *sentences):
    arguments = ["--model", model, "--device", "cpu", *sentences]
    status, output, errors = run(capsys, "translate", *arguments)
    return status, output.split("\n")[:-1], errors


SENTENCES = ["der Mann isst .", "die Frau liest ein Buch .", "ja"]


def test_arguments_are_translated_in_a_fresh_process(capsys, model, tmp_path):
    arguments = ["--model", model, "--device", "cpu", *SENTENCES]
    done = fresh("translate", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 3
    assert lines == translate(capsys, model, *SENTENCES)[1]
    assert list(tmp_path.iterdir()) == []


def test_lines_of_standard_input_are_translated_in_a_fresh_process(
    capsys, model
):
    text = "\n".join([SENTENCES[0], "", *SENTENCES[1:]]).encode()
    done = fresh("translate", "--model", model, "--device", "cpu", text=text)
    assert done.returncode == 0, done.stderr.decode()
    lines = done.stdout.decode().splitlines()
    assert lines[1] == ""
    _, alone, _ = translate(capsys, model, *SENTENCES)
    assert [lines[0], *lines[2:]] == alone
    assert b"device: cpu" in done.stderr


def test_long_input_is_translated_by_one_writer(
    capsys, small, standard_input, monkeypatch
):
    """It comes in portions; the weights are the same for all."""
    made = writers_made(monkeypatch)
    standard_input(b"ja\n" * 600)
    status, lines, _ = translate(capsys, small, "--beam", "1")
    assert status == 0 and len(lines) == 600
    assert len(made) == 1


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_each_line_has_one_line_of_output(capsys, small, standard_input, end):
    lines = [*SENTENCES, "", " ", *SENTENCES[::-1], "ja\u2028nein", "", "a"]
    standard_input(end.join(lines).encode() + end.encode())
    status, outputs, _ = translate(capsys, small)
    assert status == 0 and len(outputs) == len(lines)
    assert [not o for o in outputs[3:5]] == [True, True]
    assert outputs[:3] == outputs[5:8][::-1]


def test_many_lines_keep_their_order(capsys, small, standard_input):
    lines = SENTENCES[:2] * 130
    standard_input("".join(f"{line}\n" for line in lines).encode())
    _, outputs, _ = translate(capsys, small)
    _, alone, _ = translate(capsys, small, *SENTENCES[:2])
    assert alone[0] != alone[1]
    assert outputs == alone * 130


def test_no_input_gives_no_output(capsys, small, standard_input):
    standard_input(b"")
    assert translate(capsys, small)[:2] == (0, [])


def test_a_byte_order_mark_is_no_word(capsys, small, standard_input):
    standard_input(b"\xef\xbb\xbf" + f"{SENTENCES[0]}\n".encode())
    _, outputs, errors = translate(capsys, small)
    assert outputs == translate(capsys, small, SENTENCES[0])[1]
    assert "\ufeff" not in errors


def test_unknown_words_are_named_on_standard_error(capsys, small):
    status, outputs, errors = translate(
        capsys, small, "der Quastenflosser isst .", "der Mann isst ."
    )
    assert status == 0 and len(outputs) == 2
    [line] = [row for row in errors.splitlines() if "unknown" in row]
    assert "Quastenflosser" in line and "Mann" not in line
    assert not any("Quastenflosser" in output for output in outputs)


def test_a_line_longer_than_all_of_training_is_named(capsys, small):
    long = " ".join(SENTENCES[0].split() * 40)
    status, _, said = translate(capsys, small, long, SENTENCES[0])
    assert status == 0
    assert "longer than any in training (100)" in said
    assert said.count("a line of its own") == 1 and long[:30] in said
    both = book.load_translator(small)
    both.both = True  # with a tag, which counts for nothing
    for number, told in (100, False), (101, True):
        capsys.readouterr()
        book.tell_oddities(both, "ja " * number)
        assert ("longer than any" in capsys.readouterr().err) is told


@pytest.mark.parametrize("command", ["translate", "train"])
def test_no_memory_is_named_with_what_takes_less(
    capsys, monkeypatch, small, corpus, tmp_path, command
):
    def refuse(*_, **__):
        return torch.empty(1 << 60)  # torch's own refusal

    if command == "translate":
        monkeypatch.setattr(book, "beam_search", refuse)
        arguments = ["--model", small, "--device", "cpu", SENTENCES[0]]
    else:
        monkeypatch.setattr(book, "training", refuse)
        arguments = training_command(corpus, tmp_path / "out", 1)[1:]
    status, _, said = run(capsys, command, *arguments)
    assert status == 1 and "error: out of memory" in said
    less = "--beam" if command == "translate" else "--max-tokens"
    assert less in said and "Traceback" not in said


def test_closed_standard_input_is_an_empty_one(capsys, monkeypatch, small):
    monkeypatch.setattr("sys.stdin", None)
    assert translate(capsys, small)[:2] == (0, [])


def test_a_long_line_is_translated(capsys, small):
    sentence = "der Mann und " * 100 + "die Frau ."
    status, outputs, _ = translate(capsys, small, sentence)
    assert status == 0 and len(outputs) == 1


def test_input_of_another_encoding_is_named(capsys, model, standard_input):
    standard_input("ein Mann\nzwei Männer\n".encode("latin-1"))
    status, output, message = run(capsys, "translate", "--model", model)
    assert status == 2 and "Traceback" not in message
    assert "line 2" in message and "UTF-8" in message
    assert output.count("\n") == 1  # line 1 is not lost


@pytest.mark.parametrize("code", ["utf-16-le", "utf-16-be"])
def test_zero_bytes_in_the_input_are_named(
    capsys, small, standard_input, code
):
    standard_input("ein Mann\n".encode(code))
    message = refused(capsys, "translate", "--model", small)
    assert "line 1" in message and "iconv" in message


def test_each_line_of_an_argument_is_a_sentence(capsys, small):
    one = translate(capsys, small, SENTENCES[0], SENTENCES[1])[1]
    assert translate(capsys, small, "\n".join(SENTENCES[:2]))[1] == one


def test_a_file_that_is_taken_for_a_sentence_is_noted(capsys, small, tmp_path):
    (tmp_path / "new.de").write_text("ein Mann\n", encoding="utf-8")
    _, output, said = translate(capsys, small, tmp_path / "new.de")
    assert len(output) == 1 and f"< {tmp_path / 'new.de'}" in said


def test_the_line_is_counted_from_the_start(capsys, small, standard_input):
    standard_input(b"\n" * 999 + b"\xff\n")
    arguments = ["translate", "--model", small, "--device", "cpu"]
    status, output, errors = run(capsys, *arguments)
    assert status == 2
    assert "line 1000" in errors and "Traceback" not in errors
    assert output.strip() == "" and output.count("\n") < 1000


def test_a_reader_that_stops_reading_is_no_crash(small):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "translate", "--model", str(small)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ONE_THREAD,
    )  # fmt: skip
    process.stdout.close()
    _, errors = process.communicate(b"ja\n" * 3)
    assert b"Traceback" not in errors and b"Exception" not in errors
    assert process.returncode == 1 and b"error" not in errors


@pytest.mark.parametrize(
    "command, place, status",
    [
        pytest.param(
            ["translate", "ja"], "/dev/full", 2,
            marks=pytest.mark.skipif(
                not Path("/dev/full").exists(), reason="only Linux has it"
            ),
        ),
        (["--help"], "pipe", 1),
    ],
)  # fmt: skip
def test_what_print_kept_is_written_or_the_failure_told(
    small, command, place, status
):
    """Python itself would write it after the end, with a status of its own."""
    if command[0] == "translate":
        command = [*command, "--model", str(small), "--device", "cpu"]
    environment = {**ONE_THREAD}
    environment.pop("PYTHONUNBUFFERED", None)
    if place == "pipe":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open(place, os.O_WRONLY)
    try:
        ended = subprocess.run(
            [sys.executable, str(SCRIPT), *command],
            stdout=output, stderr=subprocess.PIPE, env=environment,
        )  # fmt: skip
    finally:
        os.close(output)
    errors = ended.stderr.decode()
    assert "Traceback" not in errors and "Exception" not in errors
    assert ended.returncode == status
    assert ("No space left" in errors) is (status == 2)


@pytest.mark.skipif(sys.platform == "darwin", reason="names are UTF-8 there")
def test_a_corpus_may_lie_where_the_name_is_no_utf_8(corpus, tmp_path):
    copied = shutil.copytree(corpus, tmp_path / os.fsdecode(b"t\xe4xte"))
    out = trained(copied, tmp_path / "out", 1)
    assert book.load_description(out)["corpus"] == str(copied)
    book.load_translator(out)


def test_without_standard_error_notes_are_not_among_translations(small):
    """Some programs are started so; standard output stays what it is."""
    command = [sys.executable, SCRIPT, "translate", "--model", small, "Hallo"]
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *map(str, command)],
        stdout=subprocess.PIPE, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0
    assert len(ended.stdout.decode().splitlines()) == 1


def test_only_a_training_meets_other_processes(capsys, monkeypatch, tmp_path):
    """In a container of a cluster the variables may be there for all."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "9",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    met = []
    monkeypatch.setattr(book, "join_processes", lambda: met.append(1))
    measure = ["evaluate", "--model", tmp_path / "none", "--corpus", "toy"]
    assert "none" in refused(capsys, *measure) and not met
    command = ["--corpus", tmp_path / "none", "--out", tmp_path / "out"]
    assert "none" in refused(capsys, "train", *command) and met == [1]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # started by torchrun
    assert "none" in refused(capsys, *measure) and met == [1, 1]


def test_a_name_that_is_no_utf_8_is_told():
    ended = fresh("translate", "--model", os.fsdecode(b"mod\xe8le"), "ja")
    assert ended.returncode == 2 and b"Traceback" not in ended.stderr
    assert rb"mod\udce8le" in ended.stderr


# ----------------------------------------------------------------- evaluating


def test_evaluate_prints_bleu_and_perplexity(capsys, model, corpus):
    arguments = ["--model", model, "--corpus", corpus, "--device", "cpu"]
    status, output, errors = run(capsys, "evaluate", *arguments)
    assert status == 0 and "device: cpu" in errors
    [(score, how)] = re.findall(r"^BLEU +(\d+\.\d\d) +(\S+)$", output, re.M)
    [perplexity] = re.findall(r"^perplexity +(\d+\.\d\d)$", output, re.M)
    assert 1 < float(perplexity) < 10_000
    assert re.search(r"^sentences +4 ", output, re.M)
    assert "case:lc" in how and "tok:13a" in how
    assert output.count("reference ") == 4


def test_a_run_that_is_not_a_model_yet_is_to_be_resumed(capsys, own, corpus):
    """It was stopped before it has validated for the first time."""
    (own / "model.json").unlink()
    for command in (["translate", "Hund"], ["evaluate", "--corpus", corpus]):
        message = refused(capsys, *command, "--model", own)
        assert "--resume" in message and str(own) in message
    (own / "checkpoint.pt").unlink()
    message = refused(capsys, "translate", "--model", own, "Hund")
    assert "train --out" in message


def test_evaluate_writes_the_same_figures_as_json(
    capsys, model, corpus, tmp_path
):
    path = tmp_path / "figures.json"
    arguments = ["--model", model, "--corpus", corpus, "--device", "cpu"]
    _, output, _ = run(capsys, "evaluate", *arguments, "--json", path)
    facts = json.loads(path.read_text(encoding="utf-8"))
    assert facts["corpus"] == str(corpus)
    assert (facts["split"], facts["direction"]) == ("test", "de-en")
    assert facts["sentences"] == 4
    for name, value in (
        ("BLEU", facts["bleu"]),
        ("BLEU, cased", facts["bleu_cased"]),
        ("chrF", facts["chrf"]),
        ("perplexity", facts["perplexity"]),
    ):
        assert re.search(rf"^{name} +{value:.2f}( |$)", output, re.M), name
    for name, numbers in (
        ("1- to 4-grams", facts["precisions"]),
        ("BLEU-1 to -4", facts["cumulative"]),
    ):
        shown = " +".join(f"{number:.1f}" for number in numbers)
        assert re.search(rf"^{name} +{shown}", output, re.M), name
    assert re.search(
        rf"^brevity +{facts['brevity_penalty']:.4f}$", output, re.M
    )


def test_evaluate_shows_five_pairs_of_many(capsys, small, corpus, tmp_path):
    for language in ("de", "en"):
        text = (corpus / f"test.{language}").read_text("utf-8") * 2
        (tmp_path / f"test.{language}").write_text(text, encoding="utf-8")
    arguments = ["--model", small, "--corpus", tmp_path, "--device", "cpu"]
    _, output, _ = run(capsys, "evaluate", *arguments)
    assert re.search(r"^sentences +8 ", output, re.M)
    assert output.count("reference ") == 5
    for number, shown in ((0, 0), (7, 7), (99, 8)):
        _, output, _ = run(capsys, "evaluate", *arguments, "--show", number)
        assert output.count("reference ") == shown
    message = refused(capsys, "evaluate", *arguments, "--show", -1)
    assert "--show must be at least 0" in message


def test_a_table_of_figures_is_that_of_its_model(capsys, corpus, small):
    translator = book.load_translator(small)
    pairs = book.corpus_part(corpus, "test", "de", "en")
    facts, outputs = book.measure(translator, pairs, 1)
    assert outputs == translator.translate([de for de, _ in pairs], 1)
    references = [en for _, en in pairs]
    score = book.bleu(outputs, references).score
    assert facts["bleu"] == round(score, 2)
    ids = [translator.encode_texts(*pair) for pair in pairs]
    perplexity = book.perplexity(translator.model, ids)
    assert facts["perplexity"] == pytest.approx(perplexity, rel=1e-3)
    right, _ = book.measure(Perfect(translator, pairs), pairs, 1)
    assert right["bleu"] == right["bleu_cased"] == right["chrf"] == 100
    assert right["brevity_penalty"] == 1
    assert right["cumulative"] == [100] * 4


class Perfect:
    """A translator that knows the answers."""

    def __init__(self, translator, pairs):
        self.model, self.answers = translator.model, dict(pairs)
        self.tgt, self.lowercase = translator.tgt, translator.lowercase
        self.encode_texts = translator.encode_texts

    def translate(self, texts, *how):
        return [self.answers[text] for text in texts]


@pytest.mark.parametrize(
    "more, named",
    [
        (["--beam", 0], "--beam"),
        (["--reverse"], "--both"),
        (["--alpha", -1], "--alpha"),
        (["--alpha", "nan"], "--alpha"),
        (["--alpha", "inf"], "--alpha"),
        (["--alpha", 400], "--alpha"),
        (["--alpha", 20.1], "--alpha"),
        (["--nbest", 5, "--beam", 4], "--nbest"),
        (["--nbest", -1], "--nbest"),
        (["--half", "--int8"], "--half"),
        (["--back-weight", 1], "--back"),
        (["--back", "nowhere", "--beam", 1], "--beam 8"),
        (["--back", "nowhere", "--back-weight", -1], "--back-weight"),
        (["--back", "nowhere", "--back-weight", "nan"], "--back-weight"),
        (["--back", "nowhere"], "nowhere"),
        (["--vote-power", 1], "--vote-power needs --vote"),
        (["--vote", "--beam", 1], "--vote needs a choice: --beam 8"),
        (["--vote", "--vote-power", -1], "--vote-power"),
        (["--vote", "--vote-power", "nan"], "--vote-power"),
        (["--vote", "--back", "nowhere"], "--vote and --back"),
    ],
)
def test_impossible_wishes_for_decoding_are_named(capsys, small, more, named):
    arguments = ["translate", "--model", small, "--device", "cpu", "ja"]
    message = refused(capsys, *arguments, *more)
    assert named in message


def test_what_cannot_be_written_is_refused_before_the_work(
    capsys, model, corpus, tmp_path
):
    path = tmp_path / "missing" / "figures.json"
    arguments = ["--model", model, "--corpus", corpus, "--device", "cpu"]
    message = refused(capsys, "evaluate", *arguments, "--json", path)
    assert f"{path.parent}: no such folder" in message
    for folder in (tmp_path, ".", ""):
        message = refused(capsys, "evaluate", *arguments, "--json", folder)
        assert f"'{folder}' is a folder" in message
    os.mkfifo(tmp_path / "pipe")  # as /dev/stdout is, which root may replace
    for option in ("--json", "--outputs"):
        message = refused(
            capsys, "evaluate", *arguments, option, tmp_path / "pipe"
        )
        assert "is no plain file" in message
    assert (tmp_path / "pipe").is_fifo()


def test_evaluate_replaces_nothing_that_it_reads(
    capsys, own, corpus, tmp_path
):
    texts = Path(shutil.copytree(corpus, tmp_path / "texts"))
    before = contents(own), contents(texts)
    how = ["--model", own, "--corpus", texts, "--device", "cpu"]
    for path in (own / "model.json", own / "weights.pt", texts / "test.en",
                 texts / "train.de"):  # fmt: skip
        for option in ("--json", "--outputs"):
            message = refused(capsys, "evaluate", *how, option, path)
            assert str(path) in message and "name another" in message
    assert (contents(own), contents(texts)) == before
    for path in texts.iterdir():  # a model and its corpus in one folder
        shutil.copy(path, own)
    how[3] = own
    path = own / "model.json"
    assert str(path) in refused(capsys, "evaluate", *how, "--json", path)
    how[3] = texts
    for path in (own / "figures.en", texts / "figures.json"):
        for _ in range(2):  # its own it may replace
            how += ["--outputs" if path.suffix == ".en" else "--json", path]
            assert run(capsys, "evaluate", *how)[0] == 0


def test_a_write_protected_file_stays(
    capsys, small, corpus, tmp_path, monkeypatch
):
    path, may = tmp_path / "figures.json", os.access
    path.write_text("{}", encoding="utf-8")
    monkeypatch.setattr(  # the tests may run as root, who may do all
        os, "access", lambda p, mode: Path(p) != path and may(p, mode)
    )
    how = ["--model", small, "--corpus", corpus, "--json", path]
    assert "is write-protected" in refused(capsys, "evaluate", *how)
    assert path.read_text("utf-8") == "{}"


def test_the_digest_is_of_the_weights_that_were_measured(
    capsys, monkeypatch, own, corpus, tmp_path
):
    """Though a training writes better ones meanwhile."""
    digest, measure = book.sha256(own / "weights.pt"), book.measure

    def slowly(*arguments, **options):
        (own / "weights.pt").write_bytes(b"better")
        return measure(*arguments, **options)

    monkeypatch.setattr(book, "measure", slowly)
    path = tmp_path / "figures.json"
    arguments = ["--model", own, "--corpus", corpus, "--device", "cpu"]
    status, _, _ = run(capsys, "evaluate", *arguments, "--json", path)
    assert status == 0
    assert json.loads(path.read_text("utf-8"))["weights"] == digest


def test_a_language_is_not_translated_into_itself(capsys, corpus, tmp_path):
    command = training_command(corpus, tmp_path / "out", 1)
    message = refused(capsys, *command, "--src", "en", "--tgt", "en")
    assert "--src and --tgt are both en" in message


def test_width_and_penalty_reach_the_search(
    capsys, monkeypatch, small, corpus, tmp_path
):
    """Of `translate`, one best and several, `evaluate` and `diversify`."""
    asked, real = [], book.beam_search

    def watched(*arguments, width=4, alpha=0.6, **more):
        asked.append((width, alpha))
        return real(*arguments, width=width, alpha=alpha, **more)

    monkeypatch.setattr(book, "beam_search", watched)
    how = ["--model", small, "--device", "cpu", "--beam", 3, "--alpha", 1.5]
    for command in (
        ["translate", *how, SENTENCES[0]],
        ["translate", *how, "--nbest", 2, SENTENCES[0]],
        ["evaluate", *how, "--corpus", corpus],
        ["diversify", *how, "--corpus", corpus, "--out", tmp_path / "more"],
    ):
        asked.clear()
        assert run(capsys, *command)[0] == 0
        assert set(asked) == {(3, 1.5)}


def test_the_n_best_come_with_their_scores(capsys, small):
    arguments = ["--nbest", 3, "--beam", 4, SENTENCES[0], "", SENTENCES[1]]
    status, lines, _ = translate(capsys, small, *arguments)
    assert status == 0 and lines[3:6] == ["0.0000\t", "-inf\t", "-inf\t"]
    del lines[3:6]  # each has as many lines, so that a program can tell
    assert len(lines) == 6
    for rows in (lines[:3], lines[3:]):
        scores = [float(row.split("\t")[0]) for row in rows]
        assert scores == sorted(scores, reverse=True) and max(scores) < 0
    best = translate(capsys, small, *SENTENCES[:2])[1]
    assert [lines[0].split("\t")[1], lines[3].split("\t")[1]] == best


@pytest.fixture(scope="module")
def other_way(corpus, tmp_path_factory):
    """The folder of a very small model of English to German, untrained."""
    folder = tmp_path_factory.mktemp("runs") / "other"
    return untrained(folder, corpus, ("en", "de"), seed=1)


@pytest.mark.parametrize("weight", [0.25, 50])
def test_another_model_reads_the_hypotheses_back(
    capsys, small, other_way, weight
):
    """Of `translate`: the same list in the order of both verdicts."""
    sources = [*SENTENCES[:2], ""]
    one, other = map(book.load_translator, (small, other_way))
    lists = one.hypotheses(sources, 6)
    expected = book.read_back(one, other, sources, lists, weight)
    plain = [[text for _, text in found] for found in one.best(sources, 6)]
    ordered = [[text for _, text in found] for found in expected]
    assert [*map(sorted, ordered)] == [*map(sorted, plain)]
    assert weight < 1 or ordered != plain  # it does change places
    how = ["--beam", 6, "--back", other_way, "--back-weight", weight]
    status, lines, _ = translate(capsys, small, *how, *sources)
    assert (status, lines) == (0, [found[0][1] for found in expected])
    status, lines, _ = translate(capsys, small, *how, "--nbest", 2, *sources)
    assert [line.split("\t")[1] for line in lines] == [
        text for found in expected for _, text in [*found, (0, "")][:2]
    ]


def test_the_other_models_verdict_counts_a_quarter(small, other_way):
    """Where no weight is given, as --help says."""
    command = ["translate", "--model", str(small), "--back", str(other_way)]
    translator, cpu = book.load_translator(small), torch.device("cpu")
    args = book.parser().parse_args(command)
    assert book.way_to_choose(args, translator, cpu)["weight"] == 0.25


def test_evaluate_measures_what_was_read_back(
    capsys, small, other_way, corpus, tmp_path
):
    path = tmp_path / "figures.json"
    how = ["--model", small, "--device", "cpu", "--beam", 6]
    how += ["--corpus", corpus, "--back", other_way, "--back-weight", 50]
    status, out, _ = run(capsys, "evaluate", *how, "--json", path)
    figures = json.loads(path.read_text("utf-8"))
    assert status == 0 and "beam 6, read back" in out
    assert figures["back"] == str(other_way) and figures["back_weight"] == 50
    one, other = map(book.load_translator, (small, other_way))
    sources, references = zip(*book.corpus_part(corpus, "test", "de", "en"))
    lists = one.hypotheses(sources, 6)
    outputs = [
        found[0][1] for found in book.read_back(one, other, sources, lists, 50)
    ]
    right = round(book.bleu(outputs, references, True).score, 2)
    assert figures["bleu"] == right
    assert outputs != one.translate(sources, 6)


def test_the_texts_of_the_beam_vote(capsys, small, corpus, tmp_path):
    """`translate` and `evaluate` take the list in the order of the votes."""
    model, sources = book.load_translator(small), [*SENTENCES[:2], ""]
    lists = model.hypotheses(sources, 6)
    by_votes = {}
    for power, more in ((1, []), (0, ["--vote-power", 0])):
        expected = by_votes[power] = book.vote(model, lists, power)
        how = ["--beam", 6, "--vote", *more]
        status, lines, _ = translate(capsys, small, *how, *sources)
        assert (status, lines) == (0, [found[0][1] for found in expected])
        status, lines, _ = translate(
            capsys, small, *how, "--nbest", 2, *sources
        )
        assert lines == [
            f"{score:.4f}\t{text}"
            for found in expected
            for score, text in [*found, (-math.inf, "")][:2]
        ]
    assert by_votes[0] != by_votes[1]
    path = tmp_path / "figures.json"
    how = ["--model", small, "--device", "cpu", "--corpus", corpus]
    how += ["--beam", 6, "--vote", "--vote-power", 0, "--json", path]
    status, out, _ = run(capsys, "evaluate", *how)
    figures = json.loads(path.read_text("utf-8"))
    assert status == 0 and "beam 6, by vote" in out
    assert figures["vote_power"] == 0 and "alpha" not in figures
    sources, references = zip(*book.corpus_part(corpus, "test", "de", "en"))
    found = book.vote(model, model.hypotheses(sources, 6), 0)
    outputs = [texts[0][1] for texts in found]
    right = round(book.bleu(outputs, references, True).score, 2)
    assert figures["bleu"] == right
    assert outputs != model.translate(sources, 6)


@pytest.mark.parametrize("likelier", [0, 1])
def test_of_texts_with_as_many_votes_the_likelier_comes_first(likelier):
    """As of two that differ in spaces alone, which chrF does not see."""

    class Joined:
        join = staticmethod(" ".join)

    texts = ["ice", "skater"], ["iceskater"]
    logs = [-1.0 if i == likelier else -3.0 for i in range(2)]
    found = [book.Hypothesis(x, x, text) for x, text in zip(logs, texts)]
    [(first, second)] = book.vote(Joined, [found])
    assert first[0] == second[0]
    assert first[1] == " ".join(texts[likelier])


def test_read_back_refuses_a_model_of_the_same_direction(small):
    model = book.load_translator(small)
    lists = model.hypotheses(SENTENCES[:1], 2)
    with pytest.raises(book.InputError, match="must translate en to de"):
        book.read_back(model, model, SENTENCES[:1], lists)


def test_only_a_model_of_the_other_direction_reads_back(capsys, small):
    arguments = ["translate", "--model", small, "--device", "cpu", "ja"]
    message = refused(capsys, *arguments, "--back", small)
    assert f"{small} translates de to en" in message
    assert "a model of en to de" in message


def test_a_model_of_both_directions_reads_itself_back(
    capsys, corpus, tmp_path
):
    pairs, _ = book.training_pairs(corpus, "de", "en")
    torch.manual_seed(0)
    sizes = dict(N=1, d_model=16, d_ff=16, h=2)
    both = book.untrained_translator(
        pairs, ("de", "en"), sizes, pieces=300, both=True
    )
    book.save_translator(both, tmp_path)
    for more, model in ([], both), (["--reverse"], both.reversed()):
        sources = SENTENCES[:2]
        lists = model.hypotheses(sources, 6)
        expected = book.read_back(model, model.reversed(), sources, lists, 9)
        how = ["--beam", 6, "--back", tmp_path, "--back-weight", 9, *more]
        status, lines, _ = translate(capsys, tmp_path, *how, *sources)
        assert (status, lines) == (0, [found[0][1] for found in expected])


def test_evaluate_takes_another_part(capsys, model, corpus):
    arguments = ["--model", model, "--corpus", corpus, "--device", "cpu"]
    _, output, _ = run(capsys, "evaluate", *arguments, "--split", "val")
    assert re.search(r"^sentences +3 ", output, re.M)


def test_it_is_told_if_other_pairs_are_held_out_than_in_training(
    capsys, corpus, tmp_path
):
    """A line more, and nearly all of them are pairs that it has learned."""
    folder, notes = tmp_path / "texts", []
    folder.mkdir()
    for path in corpus.glob("train.*"):
        shutil.copy(path, folder / path.name)
    out = trained(folder, tmp_path / "out", 1)
    how = ["--model", out, "--corpus", folder, "--beam", 1, "--device", "cpu"]
    for split in ("val", "train", "val"):
        status, _, errors = run(capsys, "evaluate", *how, "--split", split)
        assert status == 0
        notes.append("may have learned from some" in errors)
        for path in folder.iterdir() if split == "train" else ():
            path.write_text(f"more\n{path.read_text('utf-8')}", "utf-8")
    assert notes == [False, False, True]
    other = shutil.copytree(out, tmp_path / "other")
    moved = {k: 1.01 * w for k, w in weights(other).items()}
    torch.save(moved, other / "weights.pt")
    means = tmp_path / "mean", tmp_path / "mean of means"
    for mean, parts in zip(means, ([out, other], [means[0], other])):
        assert run(capsys, *average(mean, *parts))[0] == 0
        how[1] = mean
        status, _, errors = run(capsys, "evaluate", *how, "--split", "val")
        assert status == 0 and "may have learned from some" in errors


def test_it_is_told_if_the_model_of_from_had_other_pairs_held_out(
    capsys, corpus, tmp_path
):
    """By `train`, and by `evaluate` of what comes of it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in corpus.glob("train.*"):
        shutil.copy(path, folder / path.name)
    first = trained(folder, tmp_path / "first", 1)
    start, notes = ["--device", "cpu", "--steps", 1, "--corpus", folder], []
    for name in "same", "moved":
        out = tmp_path / name
        train = ["train", *start, "--from", first, "--out", out]
        status, _, errors = run(capsys, *train)
        assert status == 0
        notes.append("may have learned from some" in errors)
        how = ["--model", out, "--corpus", folder, "--split", "val"]
        how += ["--beam", 1, "--device", "cpu"]
        status, _, errors = run(capsys, "evaluate", *how)
        assert status == 0
        notes.append("may have learned from some" in errors)
        for path in folder.iterdir():
            path.write_text(f"more\n{path.read_text('utf-8')}", "utf-8")
    assert notes == [False, False, True, True]


def test_that_the_model_of_from_had_other_pairs_hinders_no_resuming(
    capsys, corpus, tmp_path
):
    first = trained(corpus, tmp_path / "first", 1)  # it has val files
    folder, out = tmp_path / "texts", tmp_path / "out"
    folder.mkdir()
    for path in corpus.glob("train.*"):
        shutil.copy(path, folder / path.name)
    for steps, more in ((1, []), (2, ["--resume"])):
        train = ["train", "--device", "cpu", "--steps", steps, "--corpus"]
        train += [folder, "--from", first, "--out", out, *more]
        status, _, errors = run(capsys, *train)
        assert status == 0 and "note: --from" in errors
    assert len(book.load_description(out)["val"]) == 2


def test_what_was_measured_is_kept_though_nobody_reads_what_is_printed(
    capsys, small, corpus, tmp_path, monkeypatch
):
    def gone(*_):
        raise BrokenPipeError

    monkeypatch.setattr(book, "print_measures", gone)
    files = tmp_path / "facts.json", tmp_path / "written.txt"
    how = ["--model", small, "--corpus", corpus, "--split", "val"]
    how += ["--beam", 1, "--device", "cpu"]
    how += ["--json", files[0], "--outputs", files[1]]
    assert run(capsys, "evaluate", *how)[0] == 1
    assert "bleu" in json.loads(files[0].read_text("utf-8"))
    assert len(lines_of(files[1])) == 3


def test_evaluate_counts_what_the_model_cannot_know(
    capsys, model, corpus, tmp_path
):
    known = (corpus / "train.de").read_text("utf-8").splitlines()[0]
    odd, long = f"{known} Wombat", " ".join(101 * known.split()[:1])
    for text, count in ((known, 0), (odd, 1), (long, 1)):
        (tmp_path / "test.de").write_text(f"{text}\n{known}\n", "utf-8")
        (tmp_path / "test.en").write_text("the\nthe\n", "utf-8")
        how = "--model", model, "--corpus", tmp_path, "--beam", 1
        _, _, errors = run(capsys, "evaluate", *how, "--device", "cpu")
        assert errors.count("note: 1 of 2 sources") == count
        assert ("unknown to this model" in errors) is (text == odd)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_model_of_other_languages_is_told_so(
    capsys, small, corpus, tmp_path, split
):
    """It has no options to name others by."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for path in corpus.iterdir():
        name = path.name.replace(".de", ".ko")
        shutil.copy(path, folder / name)
    how = ["--model", small, "--corpus", folder, "--split", split]
    message = refused(capsys, "evaluate", *how, "--device", "cpu")
    assert "the model translates de to en" in message
    assert f"{folder} has no text in de; there is: " in message


def test_a_link_to_a_file_stays_one(capsys, small, corpus, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere" / "real.txt", tmp_path / "link.txt"
    real.touch()
    link.symlink_to(real)
    how = ["--model", small, "--corpus", corpus, "--device", "cpu"]
    assert run(capsys, "evaluate", *how, "--outputs", link)[0] == 0
    assert link.is_symlink() and len(real.read_text("utf-8").splitlines()) == 4
    assert sorted(p.name for p in real.parent.iterdir()) == ["real.txt"]


@pytest.mark.parametrize("number", [-1, 1, 4])
def test_a_number_of_pieces_that_is_none_is_refused(
    capsys, corpus, tmp_path, number
):
    command = training_command(corpus, tmp_path / "out", 1)
    message = refused(capsys, *command, "--pieces", number)
    assert "0 (whole words) or more than 4" in message


def test_evaluate_writes_nothing_into_the_model(capsys, own, corpus):
    before = contents(own)
    arguments = ["--model", own, "--corpus", corpus, "--device", "cpu"]
    assert run(capsys, "evaluate", *arguments)[0] == 0
    assert contents(own) == before


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("more", [[], ["--vote"]])
def test_evaluate_says_on_a_terminal_how_far_it_is(
    monkeypatch, small, corpus, terminal, more
):
    """And nothing of that in a log."""
    said = io.StringIO()
    said.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", said)
    command = ["evaluate", "--model", small, "--corpus", corpus, *more]
    assert book.main([str(part) for part in command]) == 0
    count = len(book.corpus_part(corpus, "test", "de", "en"))
    assert (f"{count}/{count}" in said.getvalue()) == terminal
    assert ("translated" in said.getvalue()) == terminal


# --------------------------------------------------------- a larger corpus


def numbered(part, language):
    return [f"{part} {n} {language}" for n in range(30)]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A folder of 30 pairs, each unlike the others."""
    folder = tmp_path_factory.mktemp("pairs")
    for part, language in itertools.product(("train", "val"), ("de", "en")):
        text = "\n".join(numbered(part, language))
        (folder / f"{part}.{language}").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def back(pairs, tmp_path_factory):
    """The folder of a very small model of the other direction, untrained."""
    folder = tmp_path_factory.mktemp("runs") / "back"
    return untrained(folder, pairs, ("en", "de"), seed=1)


def diversify(pairs, out, *models):
    named = [part for model in models for part in ("--model", model)]
    return ["diversify", "--corpus", pairs, "--device", "cpu", "--beam", 2,
            "--out", out, *named]  # fmt: skip


def lines_of(path):
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def test_a_larger_corpus_has_the_pairs_and_what_models_make_of_them(
    capsys, pairs, small, back, tmp_path
):
    out = tmp_path / "larger"
    status, _, said = run(capsys, *diversify(pairs, out, small, back))
    assert status == 0 and "30 pairs and 60 made of them" in said
    assert "30 training pairs, 30 for validation" in said
    de, en = numbered("train", "de"), numbered("train", "en")
    ours, theirs = map(book.load_translator, (small, back))
    written = {name: lines_of(out / name) for name in ("train.de", "train.en")}
    assert written["train.de"] == de + de + theirs.translate(en, 2, 0.6)
    assert written["train.en"] == en + ours.translate(de, 2, 0.6) + en
    assert lines_of(out / "val.en") == numbered("val", "en")


def test_two_that_begin_one_larger_corpus_do_not_mix(
    capsys, monkeypatch, pairs, small, back, tmp_path
):
    """The other begins after the folder was found empty."""
    out, alone = tmp_path / "larger", book.alone

    @contextlib.contextmanager
    def late(folder):
        with alone(folder):
            (folder / "made.json").write_text('{"of": "the other"}')
            yield

    monkeypatch.setattr(book, "alone", late)
    message = refused(capsys, *diversify(pairs, out, small, back))
    assert "begun with another corpus" in message
    assert contents(out) == {"made.json": b'{"of": "the other"}'}


def test_each_model_that_makes_pairs_has_one_writer(
    capsys, monkeypatch, pairs, small, back, tmp_path
):
    real, made = book.portions, writers_made(monkeypatch)
    monkeypatch.setattr(book, "portions", lambda items, *_: real(items, 7))
    command = diversify(pairs, tmp_path / "larger", small, back)
    assert run(capsys, *command)[0] == 0
    assert len(made) == 2


def test_a_model_of_both_directions_makes_pairs_in_both(
    capsys, pairs, tmp_path
):
    corpus, _ = book.training_pairs(pairs, "de", "en")
    translator = book.untrained_translator(
        corpus, ("de", "en"), dict(N=1, d_model=16, d_ff=16, h=2),
        pieces=60, both=True,
    )  # fmt: skip
    model, out = tmp_path / "both", tmp_path / "larger"
    book.save_translator(translator, model)
    status, _, said = run(capsys, *diversify(pairs, out, model))
    assert status == 0 and "30 pairs and 60 made of them" in said
    de, en = numbered("train", "de"), numbered("train", "en")
    back = translator.reversed().translate(en, 2, 0.6)
    assert lines_of(out / "train.de") == de + de + back
    there = translator.translate(de, 2, 0.6)
    assert lines_of(out / "train.en") == en + there + en


def test_of_each_beam_the_text_closest_to_the_real_one_is_written(
    capsys, pairs, small, back, tmp_path
):
    """And a folder begun without that is not gone on with, or vice versa."""
    out = tmp_path / "larger"
    command = diversify(pairs, out, small, back)
    command[command.index("--beam") + 1] = 6
    status, _, said = run(capsys, *command, "--closest")
    assert status == 0 and "30 pairs and 60 made of them" in said
    sides = {"de": numbered("train", "de"), "en": numbered("train", "en")}
    likeness, differs = CHRF().sentence_score, 0
    for number, folder in enumerate((small, back), 1):
        model = book.load_translator(folder)
        lists = model.hypotheses(sides[model.src], 6, 0.6)
        chosen = []
        for found, real in zip(lists, sides[model.tgt]):
            texts = [model.join(hypothesis.tokens) for hypothesis in found]
            scores = [likeness(text, [real]).score for text in texts]
            chosen.append(texts[scores.index(max(scores))])
            differs += chosen[-1] != texts[0]
        assert lines_of(out / f"made-{number}.{model.tgt}") == chosen
    assert differs > 5  # else nothing was chosen
    assert "another --out" in refused(capsys, *command)
    command[command.index("--beam") + 1] = 1
    assert "--closest needs" in refused(capsys, *command, "--closest")


def test_a_corpus_that_goes_away_meanwhile_is_named(
    capsys, pairs, small, back, tmp_path, monkeypatch
):
    """And not the file that was being written then."""
    write, pairs = (
        book.write_translations,
        shutil.copytree(pairs, tmp_path / "x"),
    )

    def then_gone(*arguments):
        write(*arguments)
        (pairs / "train.en").unlink(missing_ok=True)

    monkeypatch.setattr(book, "write_translations", then_gone)
    command = diversify(pairs, tmp_path / "larger", small, back)
    status, _, said = run(capsys, *command)
    assert status == 2 and "train.en" in said and "restore the corpus" in said
    assert "not written" not in said


def test_one_model_twice_makes_no_more(capsys, pairs, small, tmp_path):
    copied = shutil.copytree(small, tmp_path / "copied")
    command = diversify(pairs, tmp_path / "larger", small, copied)
    assert "twice" in refused(capsys, *command)
    assert not (tmp_path / "larger").exists()


def test_a_larger_corpus_that_was_cut_off_is_completed(
    capsys, monkeypatch, pairs, small, back, tmp_path
):
    """And what stands there whole is not translated a second time."""
    out = tmp_path / "larger"
    command = diversify(pairs, out, small, back)
    run(capsys, *command)
    whole = contents(out)
    (out / "train.de").unlink()
    (out / "made-2.de").unlink()
    cut = whole["made-1.en"][: len(whole["made-1.en"]) // 2]
    (out / "made-1.en").write_bytes(cut)
    asked, real = [], book.Translator.translate

    def watched(self, texts, *how):
        asked.extend(texts)
        return real(self, texts, *how)

    monkeypatch.setattr(book.Translator, "translate", watched)
    assert run(capsys, *command)[0] == 0
    assert contents(out) == whole
    there = cut.count(b"\n")
    assert there > 5
    missing = numbered("train", "de")[there:], numbered("train", "en")
    assert asked == [*missing[0], *missing[1]]


def test_a_corpus_that_changes_under_diversify_is_noticed(
    capsys, pairs, small, tmp_path, monkeypatch
):
    """Else what it writes would stand beside other sentences."""
    folder = shutil.copytree(pairs, tmp_path / "pairs")
    real = book.Translator.translate

    def changing(self, sentences, *how):
        text = (folder / "train.de").read_text("utf-8")
        (folder / "train.de").write_text("neu " + text, encoding="utf-8")
        return real(self, sentences, *how)

    monkeypatch.setattr(book.Translator, "translate", changing)
    command = diversify(folder, tmp_path / "larger", small)
    said = refused(capsys, *command)
    assert f"{folder}: train.de changed while it was read" in said
    assert not (tmp_path / "larger" / "train.de").exists()


def test_a_larger_corpus_that_finds_no_room_names_its_file_and_goes_on(
    capsys, monkeypatch, pairs, small, tmp_path
):
    out = tmp_path / "larger"
    command = diversify(pairs, out, small)
    real = book.Translator.translate
    texts = "word " * 200  # more than there is room for

    def wordy(self, sentences, *how):
        return [texts.strip() for _ in sentences]

    monkeypatch.setattr(book.Translator, "translate", wordy)
    with little_room(10_000):
        said = refused(capsys, *command)
    assert f"{out / 'made-1.en'}: not written" in said
    assert "the same command goes on from there" in said
    assert said.count("not written") == 1
    monkeypatch.setattr(book.Translator, "translate", real)
    status, _, said = run(capsys, *command)
    assert status == 0 and "30 pairs and 30 made of them" in said


def test_what_a_kill_left_of_a_larger_corpus_is_removed(
    capsys, pairs, small, tmp_path
):
    out = tmp_path / "larger"
    out.mkdir()
    for name in ("made.json.7.part", "train.de.7.part", "val.en.81.part"):
        (out / name).write_text("half", encoding="utf-8")
    status, _, _ = run(capsys, *diversify(pairs, out, small))
    assert status == 0 and not [*out.glob("*.part")]
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.part").write_text("mine", encoding="utf-8")
    assert "not empty" in refused(capsys, *diversify(pairs, other, small))


def test_what_fails_while_it_is_written_leaves_nothing(tmp_path):
    def lines():
        yield "one"
        raise book.InputError("the corpus changed")

    with pytest.raises(book.InputError, match="changed"):
        book.write_lines(tmp_path / "train.de", lines())
    assert not [*tmp_path.iterdir()]


def test_another_larger_corpus_is_not_gone_on_with(
    capsys, pairs, small, back, tmp_path
):
    out = tmp_path / "larger"
    run(capsys, *diversify(pairs, out, small))
    before = contents(out)
    assert "another --out" in refused(capsys, *diversify(pairs, out, back))
    command = diversify(pairs, small, small)
    assert "not empty" in refused(capsys, *command)
    (out / "made.json").write_text("{", encoding="utf-8")
    assert "another --out" in refused(capsys, *diversify(pairs, out, small))
    (out / "made.json").write_bytes(before["made.json"])
    command = [*diversify(pairs, out, small), "--src", "fr"]
    assert "translates de to en" in refused(capsys, *command)
    assert contents(out) == before


def test_a_corpus_is_not_written_into_a_file(capsys, pairs, small, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    said = refused(capsys, *diversify(pairs, tmp_path / "file", small))
    assert "is a file" in said
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_a_text_too_long_to_validate_is_named_at_once(
    capsys, corpus, tmp_path
):
    """It would take the memory at the first validation, before a save."""
    copied = shutil.copytree(corpus, tmp_path / "copy")
    lines = lines_of(copied / "val.en")
    for letters, accepted in ((5000, True), (5001, False)):
        lines[1] = "a" * letters
        text = "\n".join(lines) + "\n"
        (copied / "val.en").write_text(text, encoding="utf-8")
        if accepted:
            book.training_pairs(copied, "de", "en")
    command = training_command(copied, tmp_path / "out", 1)
    said = refused(capsys, *command)
    assert f"{copied}: val.en, line 2: 5,001 letters" in said
    assert not (tmp_path / "out").exists()


def test_a_sentence_in_another_encoding_is_refused(capsys, small):
    said = refused(capsys, "translate", "--model", small, "gut", "l\udce4uft")
    assert "sentence 2: not UTF-8" in said


# ------------------------------------------------------ the mean of models


def near(folder, start, seed):
    """Save what a training from `start` might end as; returns its folder."""
    translator = book.load_translator(start)
    torch.manual_seed(seed)
    for weight in translator.model.parameters():
        step = 0.1 * weight.detach().abs().mean()
        weight.data += step * torch.randn_like(weight)
    book.save_translator(translator, folder)
    return folder


def average(out, *models):
    named = [part for model in models for part in ("--model", model)]
    return ["average", "--out", out, *named]


def test_a_mean_of_models_is_a_model(capsys, small, tmp_path):
    models = [near(tmp_path / f"near-{k}", small, k) for k in range(3)]
    out = tmp_path / "mean"
    status, written, said = run(capsys, *average(out, *models))
    assert (status, written) == (0, "") and str(out) in said
    found, *theirs = (
        book.load_translator(folder).model.state_dict()
        for folder in (out, *models)
    )
    for name, weight in found.items():
        mean = torch.stack([state[name] for state in theirs]).mean(0)
        torch.testing.assert_close(weight, mean)
    facts = json.loads((out / "model.json").read_text("utf-8"))
    files = [folder / "weights.pt" for folder in models]
    assert facts["mean_of"] == [book.sha256(file) for file in files]
    status, written, _ = run(capsys, "translate", "--model", out, "ein Hund")
    assert status == 0 and written.endswith("\n")


def test_a_mean_that_cannot_be_written_leaves_nothing(
    capsys, small, tmp_path, monkeypatch
):
    """Else the same command would find a folder, and refuse it."""
    models = [near(tmp_path / f"near-{k}", small, k) for k in range(2)]
    out, before = tmp_path / "mean", sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", no_space)
        status, _, said = run(capsys, *average(out, *models))
    assert status and str(out) in said and "no space" in said
    assert sorted(tmp_path.iterdir()) == before
    assert run(capsys, *average(out, *models))[0] == 0


def no_space(state, file):
    file.write(b"the first half")
    raise OSError(28, "no space left on device")


def test_a_mean_stays_tied_and_may_be_gone_on_from(capsys, corpus, tmp_path):
    start, out, on = (tmp_path / name for name in ("start", "mean", "on"))
    trained(corpus, start, 1, "--pieces", 150)
    one, other = (near(tmp_path / f"near-{k}", start, k) for k in range(2))
    assert run(capsys, *average(out, one, other))[0] == 0
    model = book.load_translator(out).model
    assert model.src_embedding is model.tgt_embedding
    state = torch.load(out / "weights.pt", weights_only=True)
    shared = [state[f"{side}_embedding.weight"] for side in ("src", "tgt")]
    assert shared[0].data_ptr() == shared[1].data_ptr()
    command = ["train", "--corpus", corpus, "--from", out, "--steps", 1,
               "--out", on, "--device", "cpu"]  # fmt: skip
    assert run(capsys, *command)[0] == 0
    start = json.loads((on / "model.json").read_text("utf-8"))["start"]
    assert start == book.sha256(out / "weights.pt")


def test_dropout_may_differ_between_models_of_a_mean(capsys, small, tmp_path):
    other = near(tmp_path / "other", small, 1)
    path = other / "model.json"
    facts = json.loads(path.read_text("utf-8"))
    facts["config"] |= {"dropout": 0.4, "attention_dropout": 0.1}
    path.write_text(json.dumps(facts), encoding="utf-8")
    assert run(capsys, *average(tmp_path / "mean", small, other))[0] == 0


def test_what_has_no_mean_is_refused(capsys, small, back, corpus, tmp_path):
    out, languages = tmp_path / "mean", ("de", "en")
    apart = untrained(tmp_path / "apart", corpus, languages, seed=1)
    text = refused(capsys, *average(out, small, apart))
    assert "did not begin as one" in text and str(apart) in text
    assert "differ in languages" in refused(capsys, *average(out, small, back))
    assert "again" in refused(capsys, *average(out, small))
    larger = tmp_path / "larger"
    pairs, _ = book.training_pairs(corpus, *languages)
    sizes = dict(N=2, d_model=16, d_ff=16, h=2)
    made = book.untrained_translator(pairs, languages, sizes)
    book.save_translator(made, larger)
    text = refused(capsys, *average(out, small, larger))
    assert "differ in N: 2, not 1" in text and str(larger) in text
    other = near(tmp_path / "other", small, 1)
    path = other / "model.json"
    facts = json.loads(path.read_text("utf-8"))
    words = facts["src_words"]
    facts["src_words"] = words[:-2] + words[:-3:-1]
    path.write_text(json.dumps(facts), encoding="utf-8")
    text = refused(capsys, *average(out, small, other))
    assert "differ in src_words" in text and len(text) < 300
    assert not out.exists()
    before = contents(small)
    assert "exists" in refused(capsys, *average(small, small, small))
    assert contents(small) == before


# --------------------------------------------------------------- the curves


@pytest.mark.parametrize(
    "ending, start", [("svg", b"<svg"), ("png", b"\x89PNG"), ("html", b"<")]
)
def test_curves_are_drawn_from_the_log(capsys, model, tmp_path, ending, start):
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
        for step in (20, 40):
            file.write(json.dumps({"step": step, "loss": 4.0}) + "\n")
    path = tmp_path / f"curves.{ending}"
    arguments = ["curves", "--model", folder, "--out", path]
    status, output, errors = run(capsys, *arguments)
    assert (status, output) == (0, "") and str(path) in errors
    drawn = path.read_bytes()
    assert drawn.lstrip().startswith(start)
    assert b'src="http' not in drawn  # a page asks no network for its parts


def test_curves_have_a_line_for_each_loss_of_the_log(tmp_path):
    lines = [
        {"step": 20, "loss": 4.0},
        {"step": 20, "val_loss": 3.5, "val_bleu": 7.0, "train_loss": 3.0},
        {"step": 40, "loss": 3.0},
        {"step": 40, "val_loss": 3.2, "val_bleu": 9.0, "train_loss": 2.0},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    (tmp_path / "log.jsonl").write_text(text, encoding="utf-8")
    drawn = book.training_curves(tmp_path).to_dict()
    drawn = [
        {(row["line"], row["x"]): row["y"] for row in rows}
        for rows in drawn["datasets"].values()
    ]
    losses, scores = sorted(drawn, key=len, reverse=True)
    smoothed = "training, smoothed, with dropout"
    assert losses == {
        (smoothed, 20): 4,
        (smoothed, 40): 3,
        ("training text", 20): 3,
        ("training text", 40): 2,
        ("validation", 20): 3.5,
        ("validation", 40): 3.2,
    }
    assert scores == {("validation", 20): 7, ("validation", 40): 9}


def test_curves_are_not_drawn_over_a_folder_or_a_pipe(capsys, model, tmp_path):
    (tmp_path / "a.svg").mkdir()
    os.mkfifo(tmp_path / "b.svg")
    for name, said in {"a.svg": "is a folder", "b.svg": "no plain"}.items():
        out = tmp_path / name
        message = refused(capsys, "curves", "--model", model, "--out", out)
        assert said in message and str(out) in message


@pytest.mark.parametrize("name", ["curves.doc", "curves"])
def test_a_picture_of_another_kind_is_refused(capsys, model, tmp_path, name):
    arguments = ["curves", "--model", model, "--out", tmp_path / name]
    assert ".svg" in refused(capsys, *arguments)


def test_a_picture_needs_its_folder(capsys, model, tmp_path):
    path = tmp_path / "none" / "curves.svg"
    said = refused(capsys, "curves", "--model", model, "--out", path)
    assert said == f"error: {path.parent}: no such folder; make it first"


@pytest.mark.parametrize("name", ["figures.json", "claims.json"])
def test_what_is_missing_is_the_folder(capsys, model, corpus, tmp_path, name):
    """Who obeyed the name of the file would make a folder in its place."""
    path = tmp_path / "none" / name
    command = ["claims", "--out", path]
    if name == "figures.json":
        command = ["evaluate", "--model", model, "--corpus", corpus,
                   "--json", path]  # fmt: skip
    said = refused(capsys, *command)
    assert said == f"error: {path.parent}: no such folder; make it first"


def test_findings_are_not_written_into_a_folder(capsys, tmp_path):
    said = refused(capsys, "claims", "--out", tmp_path)
    assert said == f"error: {str(tmp_path)!r} is a folder; name a file in it"


def test_two_kinds_of_output_need_two_files(
    capsys, monkeypatch, model, corpus, tmp_path
):
    monkeypatch.chdir(tmp_path)
    said = refused(
        capsys, "evaluate", "--model", model, "--corpus", corpus, "--json",
        "both", "--outputs", tmp_path / "both",
    )  # fmt: skip
    assert "--json and --outputs name one file" in said
    assert not (tmp_path / "both").exists()


@pytest.mark.parametrize(
    "command, option",
    [(["train", "--corpus", "toy", "--out", "run"], "--from"),
     (["claims", "--full"], "--out")],
)  # fmt: skip
def test_an_empty_name_is_not_taken_for_none(
    capsys, monkeypatch, tmp_path, command, option
):
    """As an unset variable gives it; it would train from random weights."""
    monkeypatch.chdir(tmp_path)
    said = refused(capsys, *command, option, "")
    assert f"{option} is empty" in said
    assert not any(tmp_path.iterdir())


def test_an_old_log_alone_is_not_written_over(capsys, corpus, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n', encoding="utf-8")
    command = training_command(corpus, tmp_path, 5)
    assert "log.jsonl is there already" in refused(capsys, *command)
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_a_seed_too_large_is_named(capsys):
    for seed in (2**70, 2**32, -1):
        assert "seed must be" in refused(capsys, "copy", "--seed", seed)
        with pytest.raises(book.InputError, match="seed must be"):
            book.Recipe(seed=seed)
    assert book.Recipe(seed=2**32 - 1).seed == 2**32 - 1


def test_without_a_log_there_are_no_curves(capsys, tmp_path):
    arguments = ["curves", "--model", tmp_path, "--out", tmp_path / "a.svg"]
    message = refused(capsys, *arguments)
    assert "log.jsonl" in message and str(tmp_path) in message


# ------------------------------------------------- wrong input to the training


def test_a_model_is_not_overwritten(capsys, own, corpus):
    before = contents(own)
    message = refused(capsys, *training_command(corpus, own, 6))
    assert str(own) in message and "--resume" in message
    assert contents(own) == before


def test_nothing_to_resume_is_an_error(capsys, corpus, tmp_path):
    out = tmp_path / "none"
    message = refused(capsys, *training_command(corpus, out, 6, "--resume"))
    assert str(out) in message and "without --resume" in message
    assert not out.exists()
    out.mkdir()
    (out / "model.json").write_text("{}", encoding="utf-8")
    message = refused(capsys, *training_command(corpus, out, 6, "--resume"))
    assert "another --out" in message


def test_a_corpus_may_be_elsewhere_when_a_run_is_resumed(
    capsys, own, corpus, model, tmp_path
):
    """Its texts decide, not their path."""
    moved = shutil.copytree(corpus, tmp_path / "moved")
    arguments = training_command(moved, own, 6, "--resume")
    assert run(capsys, *arguments)[0] == 0
    for name in ("model", "optimizer", "random"):
        assert same(checkpoint(own)[name], checkpoint(model)[name])


def test_words_that_occur_once_are_no_vocabulary(capsys, tmp_path):
    for part, language in itertools.product(("train", "val"), ("de", "en")):
        lines = [f"{part}{language}{n}" for n in range(20)]
        path = tmp_path / f"{part}.{language}"
        path.write_text("\n".join(lines), encoding="utf-8")
    message = refused(capsys, *training_command(tmp_path, tmp_path / "out", 1))
    assert "occurs 2 times" in message and "--pieces" in message


def test_a_corpus_of_long_lines_only_is_refused(capsys, tmp_path):
    """Lines of 3,000 words too, which sentencepiece would leave out."""
    for part, language in itertools.product(("train", "val"), ("de", "en")):
        path = tmp_path / f"{part}.{language}"
        words = 3000 if part == "train" else 3
        line = " ".join(f"{language}{n % 50}" for n in range(words))
        path.write_text(f"{line}\n" * 3, encoding="utf-8")
    for pieces in (0, 50):
        command = training_command(tmp_path, tmp_path / "out", 1)
        message = refused(capsys, *command, "--pieces", pieces)
        assert "at most 100 tokens" in message and "a line of its" in message


@pytest.mark.parametrize(
    "change, named",
    [
        (["--seed", 1], "seed"),
        (["--preset", "base"], "preset"),
        (["--src", "en", "--tgt", "de"], "direction (--src, --tgt)"),
        (["--layers", 2], "layers (--layers)"),
        (["--heads", 4], "heads (--heads)"),
    ],
)
def test_a_run_is_not_resumed_as_another(capsys, own, corpus, change, named):
    before = contents(own)
    arguments = training_command(corpus, own, 6, "--resume", *change)
    message = refused(capsys, *arguments)
    assert f" {named} has changed" in message and str(own) in message
    assert contents(own) == before


@pytest.mark.parametrize("changed", ["val.de", "val.en"])
def test_a_run_is_not_resumed_with_another_validation_set(
    capsys, corpus, tmp_path, changed
):
    """What is best would be compared with what was best on other text."""
    folder, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(corpus, folder)
    trained(folder, out, 1)
    before, path = contents(out), folder / changed
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("e", "a", 1), encoding="utf-8")
    message = refused(capsys, *training_command(folder, out, 2, "--resume"))
    assert str(out) in message and changed in message
    assert contents(out) == before
    path.write_text(text, encoding="utf-8")
    trained(folder, out, 2, "--resume")


@pytest.mark.parametrize("same_words", [True, False])
def test_a_run_is_not_resumed_with_other_sentences(
    capsys, corpus, tmp_path, same_words
):
    folder, out = tmp_path / "corpus", tmp_path / "out"
    shutil.copytree(corpus, folder)
    trained(folder, out, 1)
    before = contents(out)
    for path in folder.glob("train.*"):
        lines = path.read_text(encoding="utf-8").splitlines()
        lines = lines[::-1] if same_words else lines[:100]
        path.write_text("\n".join(lines), encoding="utf-8")
    message = refused(capsys, *training_command(folder, out, 2, "--resume"))
    assert str(out) in message and "resume" in message
    assert contents(out) == before


@pytest.mark.parametrize(
    "change, named",
    [
        (["--steps", 0], "steps"),
        (["--steps", -3], "steps"),
        (["--save-every", 0], "save-every"),
        (["--save-every", -1], "save-every"),
        (["--corpus", "nowhere"], "nowhere"),
        (["--src", "fr"], "train.fr"),
        (["--average", 0], "--average"),
        (["--pieces", -1], "--pieces"),
        (["--pieces", 10], "--pieces"),
        (["--pieces", 99_999], "--pieces"),
        (["--both"], "--pieces"),
        (["--bpe-dropout", 0.1], "--pieces"),
        (["--dropout", 1], "dropout"),
        (["--ema", 2], "ema"),
        (["--warmup", 0], "warmup"),
        (["--batch-tokens", 0], "batch_tokens"),
        (["--device", "tpu"], "tpu"),
        (["--device", "meta"], "meta"),
        (["--device", "cuda:99"], "cuda:99"),
    ],
)
def test_impossible_settings_are_named(
    capsys, corpus, tmp_path, change, named
):
    out = tmp_path / "out"
    message = refused(capsys, *training_command(corpus, out, 2, *change))
    assert named in message
    assert not out.exists()


@pytest.mark.parametrize("under", [False, True])
def test_a_file_in_the_place_of_the_folder_is_named(
    capsys, corpus, tmp_path, under
):
    path = tmp_path / "notes.txt"
    path.write_text("mine", encoding="utf-8")
    out = path / "out" if under else path
    message = refused(capsys, *training_command(corpus, out, 1))
    assert str(path) in message
    assert path.read_text(encoding="utf-8") == "mine"


def test_a_damaged_checkpoint_is_named(capsys, own, corpus):
    path = own / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:5000])
    before = contents(own)
    message = refused(capsys, *training_command(corpus, own, 6, "--resume"))
    assert str(path) in message
    assert contents(own) == before


def test_a_checkpoint_of_another_kind_of_device_is_refused(
    capsys, own, corpus
):
    """Whatever its random states are like."""
    path = own / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "device": "cuda"}, path)
    before = contents(own)
    message = refused(capsys, *training_command(corpus, own, 6, "--resume"))
    assert "began on --device cuda; go on with that one, not on cpu" in message
    assert contents(own) == before


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        PermissionError(13, "Permission denied"),
    ],
)
def test_a_file_that_cannot_be_read_now_is_not_called_damaged(
    capsys, monkeypatch, small, error
):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(torch, "load", refuse)
    status, _, said = translate(capsys, small, "ja")
    assert status in (1, 2) and "damaged" not in said
    assert "memory" in said or "Permission denied" in said


@pytest.mark.parametrize("content", [{}, [1, 2], {"step": 3, "model": {}}])
def test_a_checkpoint_of_something_else_is_named(capsys, own, corpus, content):
    torch.save(content, own / "checkpoint.pt")
    message = refused(capsys, *training_command(corpus, own, 6, "--resume"))
    assert "checkpoint.pt" in message and str(own) in message


# ---------------------------------------------------- a model that is damaged


def using(folder):
    return ["translate", "--model", folder, "--device", "cpu", "ja"]


def edit(folder, **changes):
    """Put other facts into model.json; None takes one out."""
    path = folder / "model.json"
    facts = json.loads(path.read_text(encoding="utf-8")) | changes
    facts = {name: fact for name, fact in facts.items() if fact is not None}
    path.write_text(json.dumps(facts), encoding="utf-8")


@pytest.mark.parametrize("command", ["translate", "evaluate"])
@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_a_model_is_named(
    capsys, corpus, tmp_path, command, there
):
    folder = tmp_path / "model"
    if there:
        folder.mkdir()
    more = ["--corpus", corpus] if command == "evaluate" else ["ja"]
    message = refused(capsys, command, "--model", folder, *more)
    assert str(folder) in message and "train" in message


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"config": 3}',
        b"\xff",
        b"[" * 99999,
    ],
    ids=lambda content: repr(content[:15]),
)
def test_a_description_that_is_damaged_is_named(capsys, own, content):
    (own / "model.json").write_bytes(content)
    message = refused(capsys, *using(own))
    assert str(own / "model.json") in message and "damaged" in message


@pytest.mark.parametrize("changes", [
    {"N": 2.0}, {"d_model": "8"}, {"d_ff": 8.5}, {"shared": "false"},
    {"dropout": True}, {"norm_first": 1}, {"h": True}, {"dropout": None},
], ids=repr)  # fmt: skip
def test_a_setting_of_another_kind_is_named(capsys, own, changes):
    facts = json.loads((own / "model.json").read_text(encoding="utf-8"))
    edit(own, config=facts["config"] | changes)
    message = refused(capsys, *using(own))
    assert str(own / "model.json") in message and "damaged" in message


@pytest.mark.parametrize(
    "changes", [{"N": 10**8}, {"d_model": 10**12}, {"d_ff": 2**63}], ids=repr
)
def test_a_model_larger_than_its_weights_is_not_built(capsys, own, changes):
    """It would take all memory, and a stranger may have sent it."""
    facts = json.loads((own / "model.json").read_text(encoding="utf-8"))
    edit(own, config=facts["config"] | changes)
    assert "weights.pt is not of the model" in refused(capsys, *using(own))


@pytest.mark.parametrize("language", ["punctuation", "tokenizer_exceptions"])
def test_a_language_named_as_a_module_of_spacy_has_no_rules(language):
    assert book.tokenize("So.", language) == book.tokenize("So.", "xx")


def test_word_pieces_that_are_none_are_named(capsys, own):
    (own / "pieces.model").write_bytes(b"no pieces")
    edit(own, pieces=book.sha256(own / "pieces.model"))
    assert "no word pieces of sentencepiece" in refused(capsys, *using(own))


@pytest.mark.parametrize("words", [{"a": 1}, "abc", [["a"]], 7, ["\ud800"]])
def test_words_that_are_none_are_named(capsys, own, words):
    edit(own, tgt_words=words)
    message = refused(capsys, *using(own))
    assert str(own / "model.json") in message and "damaged" in message


@pytest.mark.parametrize("name", ["model.json", "weights.pt"])
def test_a_file_in_place_of_its_folder_is_told(capsys, own, name):
    message = refused(capsys, *using(own / name))
    assert f"{own / name} is a file; name the folder" in message


@pytest.mark.parametrize("name", ["both", "lowercase"])
def test_a_word_in_place_of_true_or_false_is_named(capsys, own, name):
    facts = json.loads((own / "model.json").read_text(encoding="utf-8"))
    (own / "model.json").write_text(json.dumps(facts | {name: "no"}))
    assert f"{name} must be true or false" in refused(capsys, *using(own))


@pytest.mark.parametrize(
    "lacking", ["config", "languages", "src_words", "tgt_words"]
)
def test_a_description_that_lacks_a_fact_is_named(capsys, own, lacking):
    edit(own, **{lacking: None})
    message = refused(capsys, *using(own))
    assert str(own / "model.json") in message and lacking in message


@pytest.mark.parametrize("languages", ["de-en", ["de"], [1, 2], 7])
def test_languages_that_are_none_are_named(capsys, own, languages):
    edit(own, languages=languages)
    assert str(own / "model.json") in refused(capsys, *using(own))


def test_a_vocabulary_of_another_length_is_named(capsys, own):
    words = json.loads((own / "model.json").read_text("utf-8"))["src_words"]
    edit(own, src_words=[*words, "more"])
    message = refused(capsys, *using(own))
    assert str(len(words) + 1) in message and str(len(words)) in message


def test_missing_weights_are_named(capsys, own):
    (own / "weights.pt").unlink()
    message = refused(capsys, *using(own))
    assert str(own / "weights.pt") in message and "--resume" in message
    (own / "checkpoint.pt").unlink()
    message = refused(capsys, *using(own))
    assert str(own / "weights.pt") in message and "--resume" not in message


@pytest.mark.parametrize("kept", [0, 0.01, 0.9])
def test_truncated_weights_are_named(capsys, own, kept):
    path = own / "weights.pt"
    content = path.read_bytes()
    path.write_bytes(content[: round(kept * len(content))])
    assert str(path) in refused(capsys, *using(own))


@pytest.mark.parametrize("content", [[1], torch.ones(2), {"a": 1}, {}, 5])
def test_weights_of_something_else_are_named(capsys, own, content):
    torch.save(content, own / "weights.pt")
    message = refused(capsys, *using(own))
    assert "weights.pt" in message and str(own) in message


def test_weights_of_another_model_are_named(capsys, own):
    config = json.loads((own / "model.json").read_text("utf-8"))["config"]
    edit(own, config=config | {"N": config["N"] + 1})
    message = refused(capsys, *using(own))
    assert "weights.pt" in message and "model.json" in message


class Malicious:
    def __reduce__(self):
        return print, ("code from a file was run",)


def test_code_in_a_file_of_weights_is_not_run(capsys, own):
    torch.save(Malicious(), own / "weights.pt")
    capsys.readouterr()
    message = refused(capsys, *using(own))
    assert "code from a file" not in message
    assert str(own / "weights.pt") in message


def test_an_impossible_device_is_named(capsys, model):
    arguments = ["translate", "--model", model, "--device", "tpu", "ja"]
    message = refused(capsys, *arguments)
    assert "tpu" in message and "cpu" in message  # the value, the remedy


def test_a_missing_part_is_named_beside_what_is_there(capsys, model, corpus):
    arguments = ["--model", model, "--corpus", corpus, "--split", "dev"]
    message = refused(capsys, "evaluate", *arguments, "--device", "cpu")
    assert "dev.de" in message and "test.de" in message


def test_an_unknown_corpus_is_named(capsys, model):
    arguments = ["--model", model, "--corpus", "wmt14", "--device", "cpu"]
    message = refused(capsys, "evaluate", *arguments)
    assert "wmt14" in message and "multi30k" in message


# -------------------------------------------------- what a run says and keeps


@pytest.mark.parametrize("name", ["weights.pt", "pieces.model"])
def test_weights_of_something_else_are_not_overwritten(
    capsys, corpus, tmp_path, name
):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_bytes(b"mine")
    message = refused(capsys, *training_command(corpus, out, 2))
    assert str(out / name) in message and "--out" in message
    assert contents(out) == {name: b"mine"}


def test_no_folder_at_all_is_refused(capsys, corpus):
    message = refused(capsys, *training_command(corpus, "", 2))
    assert "--out is empty" in message


def test_two_trainings_in_one_folder_are_refused(capsys, own, corpus):
    arguments = training_command(corpus, own, 6, "--resume")
    with book.alone(own):
        before = contents(own)
        assert "another process" in refused(capsys, *arguments)
        assert contents(own) == before
    assert run(capsys, *arguments)[0] == 0


def test_a_run_says_its_recipe(capsys, corpus, tmp_path):
    more = ["--warmup", 2, "--factor", 2, "--dropout", 0.25, "--ema", 0.9]
    more += ["--decay", "linear", "--no-half"]
    arguments = training_command(corpus, tmp_path / "out", 4, *more)
    said = run(capsys, *arguments)[2]
    recipe = book.Recipe(steps=4, warmup=2, factor=2.0, decay="linear")
    width = book.load_translator(tmp_path / "out").model.config.d_model
    rates = [recipe.rate(n, width) for n in range(1, 5)]
    assert max(rates) == rates[1]
    assert f"rate: up to {rates[1]:.2g} at update 2, then it falls" in said
    assert "dropout 0.25; moving average 0.9; products in 32 bits" in said


def test_one_model_given_twice_has_no_mean(capsys, model, tmp_path):
    command = ["average", "--out", tmp_path / "mean"]
    command += ["--model", model, "--model", model]
    assert "twice" in refused(capsys, *command)
    other = shutil.copytree(model, tmp_path / "other")
    command = ["average", "--out", tmp_path / "mean"]
    command += ["--model", model, "--model", other]
    message = refused(capsys, *command)
    assert f"{model} and {other} hold the same weights" in message
    assert not (tmp_path / "mean").exists()


@pytest.mark.parametrize("kind", ["", "--int8", "--half"])
def test_evaluate_tells_what_it_measured(
    capsys, small, corpus, tmp_path, kind
):
    command = ["evaluate", "--model", small, "--corpus", corpus, "--alpha", 1]
    command += ["--device", "cpu"]  # where there is a GPU, it has no --int8
    command += ["--json", tmp_path / "e.json", "--outputs", tmp_path / "e.en"]
    status, table, _ = run(capsys, *command, *filter(None, [kind]))
    facts = json.loads((tmp_path / "e.json").read_text(encoding="utf-8"))
    products = {"--int8": "int8", "--half": "bfloat16"}.get(kind)
    assert status == 0 and facts.get("products") == products
    in_32_bits = kind == "--half"  # the loss, which no option changes there
    assert ("loss_products" in facts) is in_32_bits
    assert ("a token, without smoothing, in float32" in table) is in_32_bits
    assert ("products in" in table) == bool(kind) and "alpha 1" in table
    assert facts["model"] == str(small)
    assert facts["weights"] == book.sha256(small / "weights.pt")
    lines = (tmp_path / "e.en").read_text(encoding="utf-8").split("\n")
    assert len(lines) == facts["sentences"] + 1 and lines.pop() == ""
    assert all(f"output     {line}" in table for line in lines[:4])


def test_the_tag_of_an_exported_model_of_both_is_noted(capsys, both, tmp_path):
    needed("ctranslate2")
    command = ["export", "--format", "ctranslate2", "--model", both]
    said = run(capsys, *command, "--out", tmp_path / "out")[2]
    assert "<2en>" in said and "<2de>" in said


def test_a_picture_that_fails_leaves_nothing_behind(
    capsys, model, tmp_path, monkeypatch
):
    def fails(chart, path, **how):
        Path(path).write_text("half", encoding="utf-8")
        raise OSError(28, "No space left on device")

    altair = book.altair()
    monkeypatch.setattr(altair.TopLevelMixin, "save", fails)
    out = tmp_path / "curves.svg"
    said = refused(capsys, "curves", "--model", model, "--out", out)
    assert str(out) in said and "No space left" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kept", ["model.json", "weights.pt"])
def test_no_remedy_leads_in_a_circle(corpus, small, tmp_path, capsys, kept):
    """Of a folder that is no run: neither --resume nor its lack helps."""
    shutil.copy(small / kept, tmp_path / kept)
    command = training_command(corpus, tmp_path, 4)
    assert "--resume" not in refused(capsys, *command)
    message = refused(capsys, *command, "--resume")
    assert "without --resume" not in message and "another --out" in message
    (tmp_path / kept).rename(tmp_path / "pairs.pt")  # killed while encoding
    assert "without --resume" in refused(capsys, *command, "--resume")
