"""Several processes: one gradient, one writer, and no harm from a kill."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import one_of_several
import pytest
import torch
from helpers import (
    ONE_THREAD,
    SCRIPT,
    assert_same_run,
    checkpoint,
    contents,
    refused,
    run,
    same,
    tensors,
    trained,
    training_command,
    write_little,
)

import annotated_transformer as book

pytestmark = pytest.mark.usefixtures("one_thread", "small")

PLAIN = [
    "--dropout", 0, "--warmup", 5, "--batch-tokens", 300, "--max-tokens", 100,
    "--save-every", 4,
]  # fmt: skip
LEVERS = [
    *PLAIN, "--dropout", 0.2, "--attention-dropout", 0.1, "--r-drop", 1,
    "--norm-first", "--ema", 0.9, "--half", "--pieces", 150,
]  # fmt: skip
STEPS = 12


@pytest.fixture
def small(monkeypatch):
    """Make the preset tiny very small here too."""
    monkeypatch.setitem(book.PRESETS, "tiny", one_of_several.SMALL)
    write_little(monkeypatch)


def torchrun(*arguments, restarts=0, processes=2, **environment):
    """Run the book in several processes."""
    launch = ["-m", "torch.distributed.run", "--standalone"]
    launch += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    path = {"PYTHONPATH": str(SCRIPT.parent)}
    return subprocess.run(
        [sys.executable, *launch, one_of_several.__file__,
         *map(str, arguments)],
        env=ONE_THREAD | path | environment, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain(few, tmp_path_factory):
    """A run of two processes without dropout, and what they found before."""
    folder = tmp_path_factory.mktemp("plain")
    command = training_command(few, folder / "run", STEPS, *PLAIN)
    done = torchrun("probe", folder, *command, WATCH=str(folder))
    assert done.returncode == 0, done.stderr
    done.folder = folder
    done.found = [
        json.loads((folder / f"found-{rank}").read_text("utf-8"))
        for rank in range(2)
    ]
    return done


def run_of_two(few, tmp_path_factory):
    """The folder of a run of two processes that nobody killed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = torchrun(*training_command(few, out, STEPS, *LEVERS))
    assert done.returncode == 0, done.stderr
    return out


whole = pytest.fixture(run_of_two, scope="module")


@pytest.mark.slow
def test_pieces_tags_and_new_cuts_are_the_same_in_all_processes(few, tmp_path):
    """Learned by one, read by both; and one alone writes."""
    out = tmp_path / "run"
    levers = ["--pieces", 150, "--both", "--bpe-dropout", 0.1]
    command = training_command(few, out, 8, *PLAIN, *levers)
    done = torchrun(*command, WATCH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    one = trained(few, tmp_path / "one", 8, *PLAIN, *levers)
    assert contents(one)["pieces.model"] == contents(out)["pieces.model"]
    assert sorted(contents(one)) == sorted(contents(out))
    logs = [book.read_log(folder) for folder in (one, out)]
    for mine, yours in zip(*logs, strict=True):
        assert mine.keys() == yours.keys() and mine["step"] == yours["step"]
        for name in mine.keys() & {"loss", "val_loss", "val_bleu"}:
            assert math.isclose(mine[name], yours[name], abs_tol=1e-3)
    written = json.loads((tmp_path / "written-1").read_text("utf-8"))
    # (What an epoch is cut into lies in a file without a name.)
    assert not [path for path in written if path.startswith(f"{out}/")]


# --------------------------------------------------------------- one gradient


@pytest.mark.parametrize("parts", one_of_several.BATCHES)
@pytest.mark.parametrize("kind", one_of_several.GRADIENTS)
def test_two_processes_find_the_gradient_of_one(plain, kind, parts):
    """Though they hold different numbers of real tokens, or none."""
    one, other = (found[f"{kind}, {parts}"] for found in plain.found)
    (mine, whole), (yours, _) = one["tokens"], other["tokens"]
    assert mine != yours and mine + yours == whole
    for found in (one, other):
        near = 1e-2 if kind == "half" else 1e-12
        assert found["difference"] < near
        assert math.isclose(*found["loss"], rel_tol=near)
        assert found["equal"]  # in both processes, bit for bit


def test_processes_agree_and_wait(plain):
    for rank, found in enumerate(plain.found):
        assert found["place"] == [rank, 2]
        assert found["first"] == "from 0"
        assert found["everyone"] == [0, 1]
        assert found["shared"] == [
            ["0: a", "1: b", "0: c", "1: d", "0: e"], ["0: a"], []
        ]  # fmt: skip
        assert found["prepared before"] is (rank == 1)


def test_two_processes_train_the_model_of_one(plain, few, tmp_path):
    one = trained(few, tmp_path / "one", STEPS, *PLAIN)
    two = plain.folder / "run"
    assert sorted(contents(one)) == sorted(contents(two))
    for path in one.glob("weights*.pt"):
        mine, yours = (tensors(f / path.name) for f in (one, two))
        for name in mine:
            torch.testing.assert_close(
                mine[name], yours[name], rtol=1e-3, atol=1e-4
            )
    logs = [book.read_log(folder) for folder in (one, two)]
    for mine, yours in zip(*logs, strict=True):
        assert mine.keys() == yours.keys() and mine["step"] == yours["step"]
        for name in mine.keys() & {"loss", "val_loss", "val_bleu"}:
            assert math.isclose(mine[name], yours[name], abs_tol=1e-3)


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="threads are listed on Linux"
)
def test_the_group_has_ended_before_the_process_does(plain):
    for rank in range(2):
        assert plain.found[rank]["threads"]
        assert json.loads((plain.folder / f"left-{rank}").read_text()) == []


# ----------------------------------------------------------------- one writer


def test_only_the_first_process_writes(plain):
    first, other = (
        json.loads((plain.folder / f"written-{rank}").read_text("utf-8"))
        for rank in range(2)
    )
    run = str(plain.folder / "run")
    written = {Path(path).name for path in first if path.startswith(run)}
    assert {
        "log.jsonl",
        "model.json",
        "weights.pt",
        "checkpoint.pt",
    } <= written
    assert not [path for path in other if path.startswith(run)]


def test_only_the_first_process_speaks(plain):
    assert plain.stdout == ""
    for words in (
        "device: cpu (1 thread), each of 2 processes",
        "50 training pairs",
        "update 4: validation",
        "done: ",
    ):
        assert plain.stderr.count(words) == 1, words
    assert "Warning" not in plain.stderr


# ---------------------------------------------------------------- a long life


@pytest.mark.slow
def test_killed_processes_are_restarted_and_end_the_same(few, whole, tmp_path):
    """Each of the two is killed once, and nobody types --resume."""
    out = tmp_path / "killed"
    command = training_command(few, out, STEPS, *LEVERS)
    done = torchrun(*command, restarts=2, KILL="1@6 0@10")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("resuming after update 4") == 1
    assert done.stderr.count("resuming after update 8") == 1
    assert_same_run(out, whole)


def test_if_one_process_is_asked_to_stop_all_save_and_end(
    few, whole, tmp_path
):
    """They learn of it when the next update is done, and lose none."""
    out = tmp_path / "asked"
    command = training_command(few, out, STEPS, *LEVERS)
    how = {"KILL": "1@5", "SIGNAL": str(int(signal.SIGTERM))}
    done = torchrun(*command, restarts=1, **how)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stopped after update 6, and saved") == 1
    assert done.stderr.count("resuming after update 6") == 1
    assert_same_run(out, whole)


@pytest.mark.slow
def test_a_refused_folder_is_not_gone_on_with_after_a_restart(
    few, whole, tmp_path
):
    """torchrun restarts what has failed; the run there is another's."""
    out = Path(shutil.copytree(whole, tmp_path / "copy"))
    before = contents(out)
    command = training_command(few, out, STEPS + 2, *LEVERS)
    done = torchrun(*command, restarts=1)
    assert done.returncode != 0
    assert done.stderr.count(f"{out} holds a model already") == 2
    assert contents(out) == before


def test_a_restart_goes_on_with_what_its_launch_began(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not book.begun_by_this_launch(tmp_path)
    (tmp_path / "checkpoint.pt").touch()
    assert not book.begun_by_this_launch(tmp_path)
    book.note_launch(tmp_path)
    assert book.begun_by_this_launch(tmp_path)
    with monkeypatch.context() as patch:  # a later torchrun
        patch.setattr(book.os, "getppid", lambda: -1)
        assert not book.begun_by_this_launch(tmp_path)
    with monkeypatch.context() as patch:  # the same, of two machines one
        patch.setattr(book, "everyone", lambda name: [name, "new 7 3"])
        assert book.begun_by_this_launch(tmp_path)
    with monkeypatch.context() as patch:  # no torchrun
        patch.delenv("TORCHELASTIC_RUN_ID")
        assert not book.begun_by_this_launch(tmp_path)
    (tmp_path / "checkpoint.pt").unlink()
    assert not book.begun_by_this_launch(tmp_path)


def test_a_launch_is_forgotten_when_its_run_has_ended(whole):
    assert not (whole / "launch").exists()


def test_a_file_called_launch_of_something_else_stays(
    capsys, corpus, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    out.mkdir()
    (out / "launch").write_text("my script", encoding="utf-8")
    message = refused(capsys, *training_command(corpus, out, 1))
    assert str(out / "launch") in message and "something else" in message
    assert (out / "launch").read_text("utf-8") == "my script"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # one that was killed
    (out / "launch").unlink()
    book.note_launch(out)
    book.refuse_other_model(out)


def test_each_process_draws_its_own_dropout(plain, whole):
    """Without dropout nothing is drawn: there, states are as they began."""
    for folder in (plain.folder / "run", whole):
        states = checkpoint(folder)["random"]
        assert len(states) == 2 and not states[0].equal(states[1])


def test_more_processes_than_before_draw_each_their_own(
    corpus, tmp_path, monkeypatch
):
    out, drawn = trained(corpus, tmp_path / "out", 1), []
    translator = book.load_translator(out)
    facts = book.saved_description(out)
    monkeypatch.setattr(book, "everyone", lambda value: [value])
    for rank in range(2):
        monkeypatch.setattr(book, "place", lambda rank=rank: (rank, 2))
        run = book.Run(translator, book.adam(translator.model), None, facts)
        run.load(out)
        drawn.append(torch.rand(4))
    assert not drawn[0].equal(drawn[1])


def test_another_number_of_processes_goes_on_with_a_note(
    capsys, few, whole, tmp_path
):
    out = Path(shutil.copytree(whole, tmp_path / "copy"))
    command = training_command(few, out, STEPS + 2, *LEVERS, "--resume")
    status, _, errors = run(capsys, *command)
    assert status == 0
    assert f"resuming after update {STEPS}" in errors
    assert "note: processes then 2, now 1" in errors
    after = checkpoint(out)
    assert after["step"] == STEPS + 2 and len(after["random"]) == 1
    assert not same(after["model"], checkpoint(whole)["model"])


def test_a_checkpoint_of_one_state_is_that_of_one_process(few, tmp_path):
    """As they were written before there could be several."""
    whole = trained(few, tmp_path / "whole", 8, *LEVERS)
    out = trained(few, tmp_path / "out", 4, *LEVERS)
    path = out / "checkpoint.pt"
    state = torch.load(path, weights_only=True)
    [state["random"]] = state["random"]
    torch.save(state, path)
    trained(few, out, 8, *LEVERS, "--resume")
    assert same(checkpoint(out), checkpoint(whole))


# --------------------------------------------------------------- what is wrong


@pytest.mark.parametrize("late", [{}, {"LINGER": "2"}])
def test_wrong_input_gives_one_message(few, tmp_path, late):
    # also where the process that knows why is the last to end
    command = training_command(few, tmp_path / "out", 4, "--corpus", "nowhere")
    done = torchrun(*command, **late)
    assert done.returncode != 0 and done.stdout == ""
    said = [s for s in done.stderr.splitlines() if s.startswith("error: ")]
    assert len(said) == 1 and "nowhere" in said[0]
    assert "exitcode  : 2" in done.stderr  # torchrun's report; its own is 1
    assert not (tmp_path / "out").exists()


@pytest.fixture
def second_of_two(monkeypatch):
    """As if this were a process of two, as far as it asks for its place."""
    monkeypatch.setattr(book, "place", lambda: (1, 2))
    monkeypatch.setitem(os.environ, "LOCAL_RANK", "1")


@pytest.mark.parametrize("device", ["mps", "cuda:1", "gpu"])
def test_several_processes_run_on_cpu_or_cuda(second_of_two, device):
    with pytest.raises(book.InputError, match=f"--device {device}"):
        book.own_device(device)
    assert book.own_device("cpu").type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU, no message")
def test_a_gpu_that_is_not_there_is_named(second_of_two):
    assert book.own_device("auto").type == "cpu"
    with pytest.raises(book.InputError, match="cuda:1"):
        book.own_device("cuda")


def test_several_processes_only_train(second_of_two):
    with pytest.raises(book.InputError, match="torchrun"):
        book.run_command(["copy"])


def test_a_mistyped_option_is_shown_once(capsys, second_of_two):
    with pytest.raises(SystemExit):
        book.run_command(["train", "--stepps", "3"])
    assert capsys.readouterr().err == ""


def test_an_error_of_ours_is_not_taken_for_a_lost_process(second_of_two):
    gone = RuntimeError("[/gloo/transport/tcp/pair.cc:547] Connection closed")
    assert book.lost_contact(gone)
    assert not book.lost_contact(RuntimeError("shapes do not fit"))


@pytest.mark.parametrize("option, expected", [([], 8192), ([5000], 5000)])
def test_each_process_has_room_for_its_part(
    second_of_two, monkeypatch, option, expected
):
    monkeypatch.setattr(book, "from_first", lambda function: function())
    more = [x for value in option for x in ("--max-tokens", str(value))]
    args = book.parser().parse_args(
        ["train", "--corpus", "x", "--out", "y", "--preset", "base"]
        + ["--no-onednn", *more]
    )
    recipe, _, _ = book.settings_of(args)
    assert recipe.max_tokens == expected


def test_more_at_once_than_in_all_is_refused(capsys, few, tmp_path):
    details = ["--batch-tokens", 300, "--max-tokens", 301]
    command = training_command(few, tmp_path / "out", 4, *details)
    assert "max_tokens" in refused(capsys, *command)
