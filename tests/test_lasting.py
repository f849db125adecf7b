"""Training that lasts: killed at any moment, a run goes on as it was."""

import contextlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
import torch
from helpers import (
    ONE_THREAD,
    SCRIPT,
    assert_same_run,
    checkpoint,
    contents,
    fresh,
    little_room,
    refused,
    run,
    same,
    started_from,
    tensors,
    trained,
    training_command,
    weights,
    write_little,
)

import annotated_transformer as book

pytestmark = pytest.mark.usefixtures("one_thread")

# All that draws random numbers or remembers the past.
LEVERS = [
    "--pieces", 150, "--norm-first", "--dropout", 0.2, "--r-drop", 1,
    "--attention-dropout", 0.1, "--bpe-dropout", 0.1, "--ema", 0.9,
    "--half", "--warmup", 5, "--batch-tokens", 300, "--average", 3,
    "--save-every", 4,
]  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    """Make the preset tiny very small, for runs in this process."""
    sizes = dict(N=1, d_model=16, d_ff=16, h=2, dropout=0.1)
    monkeypatch.setitem(book.PRESETS, "tiny", sizes)
    write_little(monkeypatch)


@pytest.fixture(scope="module")
def whole(few, tmp_path_factory):
    """The folder of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return trained(few, out, 12, *LEVERS)


def resume(corpus, out, *details):
    """Go on in this process, from the start if nothing was written."""
    began = (out / "checkpoint.pt").exists()
    return trained(corpus, out, *details, *(["--resume"] if began else []))


def same_run(one, other):
    """Whether two folders hold the same files, times aside."""
    assert sorted(contents(one)) == sorted(contents(other))
    assert same(checkpoint(one), checkpoint(other))
    for path in one.glob("weights*.pt"):
        assert same(*(tensors(f / path.name) for f in (one, other)))
    for name in ("model.json", "pieces.model"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    logs = [book.read_log(folder) for folder in (one, other)]
    assert [line["step"] for line in logs[0]] == [
        line["step"] for line in logs[1]
    ]
    assert validated(one) == validated(other)
    return True


def validated(folder):
    """What a run's validations gave, step by step."""
    return [
        {
            name: value
            for name, value in line.items()
            if name == "step" or "val_" in name or "train_loss" in name
        }
        for line in book.read_log(folder)
        if "val_bleu" in line or "average_val_bleu" in line
    ]


def test_a_thousand_pairs_are_translated_at_a_validation(
    few, tmp_path, monkeypatch
):
    """The first ones: more would take too long."""
    for part in ("train", "val"):
        for language in ("de", "en"):
            lines = (few / f"{part}.{language}").read_text("utf-8")
            lines = lines.splitlines() * (1 if part == "train" else 334)
            lines[999:] = [f"{lines[i]} {i}" for i in range(999, len(lines))]
            path = tmp_path / f"{part}.{language}"
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    asked = []

    def noted(self, texts, *how):
        asked.append(list(texts))
        return list(texts)

    monkeypatch.setattr(book.Translator, "translate", noted)
    trained(tmp_path, tmp_path / "out", 1, "--average", 1)
    texts = (tmp_path / "val.de").read_text("utf-8").splitlines()
    assert len(texts) == 1002
    assert asked and all(part == texts[:1000] for part in asked)


# ------------------------------------------------------------------- killed


def test_what_is_written_is_on_the_disk_before_it_has_its_name(
    tmp_path, monkeypatch
):
    """Or a power cut could leave a name without contents."""
    order, flush, move = [], os.fsync, os.replace

    def flushed(file):
        order.append("fsync")
        flush(file)

    def moved(*paths):
        order.append("replace")
        move(*paths)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "replace", moved)
    path = tmp_path / "file"
    book.write_whole(path, lambda part: part.write_text("x", "utf-8"))
    assert order == ["fsync", "replace"] and path.read_text("utf-8") == "x"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_is_ignored_stays_ignored(number):
    """As SIGINT is for what a shell runs in the background."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with book.asked_to_stop() as request:
            signal.raise_signal(number)
            assert request() == 0
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_outside_the_main_thread_there_are_no_signals():
    found = []

    def work():
        with book.asked_to_stop() as request:
            found.append(request())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]


def start(corpus, out, *details):
    began = (out / "checkpoint.pt").exists()
    arguments = training_command(corpus, out, *details)
    arguments += ["--resume"] if began else []
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=ONE_THREAD,
    )  # fmt: skip


def kill_after(process, path, seconds, times=1):
    """SIGKILL, so long after `path` was written; False if it ended."""

    def written():
        return path.stat().st_mtime_ns if path.exists() else 0

    before = written()
    try:
        while process.poll() is None and times:
            if written() != before:
                before, times = written(), times - 1
            time.sleep(0.002)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    finally:
        process.kill()
        process.wait()
    return process.returncode == -signal.SIGKILL


def test_a_killed_run_can_be_resumed(few, whole, tmp_path):
    out = tmp_path / "killed"
    process = start(few, out, 12, *LEVERS)
    assert kill_after(process, out / "checkpoint.pt", 0, times=2)
    assert 0 < checkpoint(out)["step"] < 12
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


@pytest.mark.slow
def test_a_run_killed_many_times_ends_the_same(few, whole, tmp_path):
    began = time.perf_counter()
    trained(few, tmp_path / "timed", 12, *LEVERS)
    half = (time.perf_counter() - began) / 2
    out, draw, kills = tmp_path / "killed", random.Random(0), 0
    while kills < 4:
        process = start(few, out, 12, *LEVERS)
        name = draw.choice(["log.jsonl", "checkpoint.pt"])
        # A process that is faster than the one that was timed may end first.
        later = half * draw.random() if kills > 1 else 0
        if not kill_after(process, out / name, later):
            break  # it was done before
        kills += 1
        for path in out.glob("*.pt"):  # what is there is whole
            torch.load(path, weights_only=True)
    assert kills > 1
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


def signalled(monkeypatch, step, *numbers):
    """Let a run get these signals once that update is behind it."""
    training = book.training

    def asked(*arguments):
        for update in training(*arguments):
            yield update
            if update.step == step:
                for number in numbers:
                    signal.raise_signal(number)

    monkeypatch.setattr(book, "training", asked)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_saves_first(
    capsys, few, whole, tmp_path, monkeypatch, number
):
    """And goes on from there, though no checkpoint was due."""
    out = tmp_path / "asked"
    both = signal.SIGINT, signal.SIGTERM
    handlers = [signal.getsignal(n) for n in both]
    with monkeypatch.context() as patch:
        signalled(patch, 5, number)
        command = training_command(few, out, 12, *LEVERS)
        status, _, errors = run(capsys, *command)
    assert status == 128 + number
    assert "stopped after update 6, and saved" in errors
    assert "--resume" in errors and "Traceback" not in errors
    assert checkpoint(out)["step"] == 6
    assert handlers == [signal.getsignal(n) for n in both]
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


class Deaf:
    """A standard error whose reader, `tee` say, has gone."""

    encoding = "utf-8"

    def write(self, text=""):
        raise BrokenPipeError

    flush = write


def test_a_run_that_nobody_listens_to_is_saved_all_the_same(
    few, whole, tmp_path, monkeypatch
):
    """Ctrl-C ends the whole pipeline, and `tee` before its update is done."""
    out = tmp_path / "asked"
    with monkeypatch.context() as patch:
        signalled(patch, 5, signal.SIGINT)
        patch.setattr(sys, "stderr", Deaf())
        command = map(str, training_command(few, out, 12, *LEVERS))
        assert book.main([*command]) == 130
        assert isinstance(sys.stderr, Deaf)
    assert checkpoint(out)["step"] == 6
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


def test_each_layer_is_saved_and_comes_back(few, tmp_path, monkeypatch):
    """Its weights, their average and what the optimizer knows of them."""
    write_little(monkeypatch)
    how = ["--layers", 2, "--ema", 0.9, "--average", 2, "--save-every", 1]
    how += ["--warmup", 1]
    out = trained(few, tmp_path / "out", 2, *how)
    before = checkpoint(out)
    assert same(before["model"], tensors(out / "weights-000002.pt"))
    trained(few, out, 2, *how, "--resume")  # it saves what it has loaded
    assert same(checkpoint(out), before)


def test_a_run_may_end_where_it_was_stopped(
    capsys, few, tmp_path, monkeypatch
):
    """Before its first validation: then it has one, and a model."""
    out, plain, how = (
        tmp_path / "asked",
        tmp_path / "plain",
        ["--ema", 0.9],
    )
    with monkeypatch.context() as patch:
        signalled(patch, 2, signal.SIGTERM)
        status, _, _ = run(capsys, *training_command(few, out, 12, *how))
    assert status == 128 + signal.SIGTERM
    assert not (out / "weights.pt").exists()
    for _ in range(2):  # the second time there is nothing to be done
        resume(few, out, 3, *how)
        [entry] = [e for e in book.read_log(out) if "val_bleu" in e]
        assert entry["step"] == 3
    trained(few, plain, 3, *how)
    assert_same_run(out, plain)


def test_the_last_weights_of_a_run_cut_short_are_validated(
    capsys, few, tmp_path, monkeypatch
):
    """And are in the mean, though no checkpoint was due."""
    out, how = tmp_path / "asked", ["--save-every", 2, "--average", 2]
    with monkeypatch.context() as patch:
        signalled(patch, 4, signal.SIGTERM)
        run(capsys, *training_command(few, out, 12, *how))
    resume(few, out, 5, *how)
    log = book.read_log(out)
    assert [e["step"] for e in log if "val_bleu" in e] == [2, 4, 5]
    assert [e["step"] for e in log if "average_val_bleu" in e] == [5]
    names = [path.name for path in book.snapshots(out)]
    assert names == ["weights-000004.pt", "weights-000005.pt"]


def test_asked_at_a_checkpoint_it_is_whole(
    capsys, few, whole, tmp_path, monkeypatch
):
    out = tmp_path / "asked"
    with monkeypatch.context() as patch:
        signalled(patch, 7, signal.SIGTERM)
        command = training_command(few, out, 12, *LEVERS)
        status, _, errors = run(capsys, *command)
    assert status == 128 + signal.SIGTERM and "after update 8, and" in errors
    assert "update 8: validation BLEU" not in errors  # that takes long
    command = training_command(few, out, 12, *LEVERS, "--resume")
    status, _, errors = run(capsys, *command)
    assert status == 0 and "update 8: validation BLEU" in errors
    assert same_run(out, whole)


@pytest.mark.parametrize("step", [8, 12])
@pytest.mark.parametrize("place", ["validate", "keep_snapshot"])
def test_killed_while_it_validates_a_run_loses_no_update(
    capsys, few, whole, tmp_path, monkeypatch, step, place
):
    """A validation may take longer than a queue waits before it kills."""
    out, function = tmp_path / "out", getattr(book, place)

    def killed(run, *arguments):
        found = function(run, *arguments)
        if run.step == step:
            raise KeyboardInterrupt
        return found

    with monkeypatch.context() as patch:
        patch.setattr(book, place, killed)
        command = training_command(few, out, 12, *LEVERS)
        assert run(capsys, *command)[0] == 128 + signal.SIGINT
    assert checkpoint(out)["step"] == step
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


def test_machines_must_see_one_folder_and_are_told_so_at_once(
    capsys, few, small, tmp_path, monkeypatch
):
    """At the end, where the others read what the first wrote, it is late."""
    everyone = book.everyone

    def other_sees_nothing(value):
        return everyone(value) + [False] * (value is True)

    monkeypatch.setattr(book, "everyone", other_sees_nothing)
    out = tmp_path / "out"
    message = refused(capsys, *training_command(few, out, 12, *LEVERS))
    assert f"{out}: not every process sees" in message
    assert not list(out.glob("weights*.pt"))


def test_who_asks_twice_is_not_kept_waiting(
    capsys, few, tmp_path, monkeypatch
):
    out = tmp_path / "asked"
    signalled(monkeypatch, 5, signal.SIGINT, signal.SIGINT)
    status, _, errors = run(capsys, *training_command(few, out, 12, *LEVERS))
    assert status == 128 + signal.SIGINT
    assert "goes on from its last checkpoint by --resume" in errors
    assert checkpoint(out)["step"] == 4


def test_a_second_sigterm_changes_nothing(
    capsys, few, whole, tmp_path, monkeypatch
):
    """A queue may send it to each process, and torchrun once more."""
    out, killed = tmp_path / "asked", []
    before = signal.signal(signal.SIGTERM, lambda *_: killed.append(1))
    try:
        with monkeypatch.context() as patch:
            signalled(patch, 5, signal.SIGTERM, signal.SIGTERM)
            command = training_command(few, out, 12, *LEVERS)
            status, _, _ = run(capsys, *command)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (status, killed) == (128 + signal.SIGTERM, [])
    assert checkpoint(out)["step"] == 6
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


def test_a_request_at_the_last_update_changes_nothing(
    capsys, few, whole, tmp_path, monkeypatch
):
    """It ends anyway, with all that an end has."""
    out = tmp_path / "asked"
    signalled(monkeypatch, 11, signal.SIGTERM)
    status, _, _ = run(capsys, *training_command(few, out, 12, *LEVERS))
    assert status == 0 and same_run(out, whole)


def test_a_process_stops_as_it_is_asked_to(few, whole, tmp_path):
    out = tmp_path / "asked"
    process = start(few, out, 12, *LEVERS)
    try:
        while not (out / "log.jsonl").exists() and process.poll() is None:
            time.sleep(0.002)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert 0 < checkpoint(out)["step"] < 12
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)


def keep_what_a_kill_would_leave(monkeypatch, out, stops):
    """Copy the run before, within and after each write; what was written.

    A copy that would be as the one before is left out. Within: half of the
    file stands under its passing name.
    """
    write_whole, written, kept = book.write_whole, [], [{}]

    def keep(when):
        left = contents(out) if out.exists() else {}
        if left != kept[-1]:
            kept.append(left)
            shutil.copytree(out, stops / f"{len(kept)} {when} {written[-1]}")

    def watched(path, write):
        def half(partial):
            write(partial)
            content = partial.read_bytes()
            partial.write_bytes(content[: len(content) // 2])
            keep("within")
            partial.write_bytes(content)

        written.append(path.name)
        keep("before")
        write_whole(path, half)
        keep("after")

    monkeypatch.setattr(book, "write_whole", watched)
    return written


def test_a_run_may_die_at_any_write(few, small, tmp_path, monkeypatch):
    whole, stops = tmp_path / "whole", tmp_path / "stops"
    with monkeypatch.context() as patch:
        written = keep_what_a_kill_would_leave(patch, whole, stops)
        trained(few, whole, 8, *LEVERS)
    assert written.count("checkpoint.pt") == 5  # before, after validation
    left = sorted(stops.iterdir())
    assert sum("within" in out.name for out in left) == len(written)
    for out in left:
        for path in out.glob("*.pt"):  # what is there is whole
            torch.load(path, weights_only=True)
        resume(few, out, 8, *LEVERS)
        assert same_run(out, whole), out.name


def test_half_a_file_is_never_left_in_the_place_of_a_whole_one(
    capsys, few, small, tmp_path, monkeypatch
):
    out, save = trained(few, tmp_path / "out", 4, *LEVERS), torch.save
    before = contents(out)

    def full_disk(state, path):
        """As torch.save does where the bytes find no room."""
        with little_room(1000):
            save(state, path)

    monkeypatch.setattr(torch, "save", full_disk)
    arguments = training_command(few, out, 8, *LEVERS, "--resume")
    message = refused(capsys, *arguments)
    assert "no space left?" in message and str(out) in message
    after = contents(out)
    assert after.keys() == before.keys()
    for name in before.keys() - {"log.jsonl", "model.json"}:
        assert after[name] == before[name], name
    monkeypatch.setattr(torch, "save", save)
    resume(few, out, 8, *LEVERS)
    whole = trained(few, tmp_path / "whole", 4, *LEVERS)
    assert same_run(out, resume(few, whole, 8, *LEVERS))


def test_equal_weights_are_equal_files_whoever_writes_them(
    tmp_path, monkeypatch
):
    """Their digests tell whether two machines have the same model."""
    model, written = book.tiny_model(), []
    for number in (1, 22_222):
        monkeypatch.setattr(os, "getpid", lambda number=number: number)
        book.write_tensors(tmp_path / "weights.pt", model.state_dict())
        written.append((tmp_path / "weights.pt").read_bytes())
    assert written[0] == written[1]
    assert [*tmp_path.iterdir()] == [tmp_path / "weights.pt"]


@pytest.mark.parametrize("error, why", [
    (OSError(28, "No space left on device"), "No space left"),
    (PermissionError(13, "Permission denied"), "Permission denied"),
    (RuntimeError("unexpected pos 64 vs 0\nmore"), "no space left?"),
])  # fmt: skip
def test_what_is_not_written_is_named(tmp_path, error, why):
    """The system names no file, or a passing one."""

    def write(path):
        path.write_text("ha", encoding="utf-8")
        raise error

    path = tmp_path / "file"
    with pytest.raises(book.NotWritten) as found:
        book.write_whole(path, write)
    text = str(found.value)
    assert text.startswith(f"{path}: not written") and why in text
    assert ".part" not in text and not list(tmp_path.iterdir())


def test_what_is_no_fault_of_the_disk_is_not_blamed_on_it(tmp_path):
    for error in (
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.cuda.OutOfMemoryError("out of memory"),
    ):

        def write(path, error=error):
            raise error

        with pytest.raises(RuntimeError) as found:
            book.write_whole(tmp_path / "file", write)
        assert found.value is error


def test_a_full_memory_is_not_taken_for_another_models_checkpoint(
    few, tmp_path, monkeypatch
):
    out = trained(few, tmp_path / "out", 1)

    def full(self, state):
        raise torch.OutOfMemoryError("CUDA out of memory")

    translator = book.load_translator(out)
    optimizer = book.adam(translator.model)
    monkeypatch.setattr(type(optimizer), "load_state_dict", full)
    facts = book.saved_description(out)
    run = book.Run(translator, optimizer, None, facts)
    with pytest.raises(torch.OutOfMemoryError):
        run.load(out)


def test_a_log_that_cannot_be_written_names_itself_and_the_remedy(
    capsys, few, tmp_path, monkeypatch
):
    def full(self, step, **values):
        with book.naming(self.path):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(book.Log, "write", full)
    out = tmp_path / "out"
    message = refused(capsys, *training_command(few, out, 4, *LEVERS))
    assert f"{out}/log.jsonl: not written" in message
    assert "--resume" in message


def test_no_place_is_named_before_anything_is_done(
    capsys, few, small, tmp_path, monkeypatch
):
    def no(path, mode):
        assert mode == os.W_OK
        return Path(path) != tmp_path

    monkeypatch.setattr(os, "access", no)
    for options in ([], ["--cache", tmp_path / "cache"]):
        out = (tmp_path if not options else few) / "new"
        message = refused(
            capsys, *training_command(few, out, 4, *LEVERS), *options
        )
        assert f"{tmp_path}: you may not write there" in message
        assert not out.exists()
    message = refused(
        capsys, "evaluate", "--model", small, "--corpus", few,
        "--json", tmp_path / "x.json",
    )  # fmt: skip
    assert f"{tmp_path}: you may not write there" in message
    model = "--model", few / "a model"  # which nobody looks for any more
    export = "export", "--format", "ctranslate2", *model
    for command in (export, ("average", *model, *model)):
        message = refused(capsys, *command, "--out", tmp_path / "made")
        assert f"{tmp_path}: you may not write there" in message


def test_ctrl_c_leaves_no_half_file(tmp_path):
    def write(path):
        path.write_text("ha", encoding="utf-8")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        book.write_whole(tmp_path / "file", write)
    assert not list(tmp_path.iterdir())


def test_what_is_no_number_is_not_saved(capsys, few, small, tmp_path):
    """A run that diverges ends, and its last checkpoint is a good one."""
    out = tmp_path / "out"
    how = ["--warmup", 1, "--factor", 1e6, "--save-every", 1]
    message = refused(capsys, *training_command(few, out, 9, *how))
    assert re.search(r"update \d+: the loss or a weight is no num", message)
    assert "--factor" in message and "--warmup" in message
    for weight in checkpoint(out)["model"].values():
        assert weight.isfinite().all()


def test_half_a_file_in_a_cache_goes_after_a_day(few, small, tmp_path):
    """Not sooner: another run may just be writing it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    old, new = (cache / f"pairs.pt.{n}.part" for n in (1, 2))
    for path in (old, new):
        path.write_text("half", encoding="utf-8")
    os.utime(old, (0, 0))
    trained(few, tmp_path / "out", 1, "--cache", cache)
    assert {path.name for path in cache.iterdir()} == {"pairs.pt", new.name}


def test_everything_written_loads_as_tensors_only(whole):
    files = sorted(whole.glob("*.pt"))
    assert len(files) == 6
    for path in files:
        torch.load(path, weights_only=True)
    assert not list(whole.glob("*.part"))


def test_resuming_a_run_that_is_done_adds_nothing(few, whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "copy"))
    resume(few, out, 12, *LEVERS)
    assert same_run(out, whole)
    assert read_scores(out) == read_scores(whole)


@pytest.mark.parametrize(
    "change, named",
    [
        (["--ema", 0.8], "ema"),
        (["--r-drop", 2], "r_drop"),
        (["--bpe-dropout", 0.3], "bpe_dropout"),
        (["--pieces", 140], "vocabulary (--pieces)"),
        (["--dropout", 0.3], "dropout"),
        (["--warmup", 6], "warmup"),
        (["--decay", "linear"], "decay"),
        (["--d-ff", 64], "d_ff"),
        (["--batch-tokens", 200], "batch_tokens (--batch-tokens)"),
        (["--both"], "both"),
    ],
)
def test_a_run_is_not_resumed_with_other_levers(
    capsys, few, whole, tmp_path, change, named
):
    out = Path(shutil.copytree(whole, tmp_path / "copy"))
    before = contents(out)
    arguments = training_command(few, out, 16, *LEVERS, *change, "--resume")
    message = refused(capsys, *arguments)
    assert f" {named} has changed" in message and str(out) in message
    # What a model is made of stays, and one way has no tags for the other.
    stays = named in ("d_ff", "vocabulary (--pieces)", "the direction", "both")
    assert ("goes on from its weights" in message) is not stays
    assert contents(out) == before


@pytest.mark.parametrize("lost", ["weights.pt", "model.json", "all"])
@pytest.mark.parametrize("steps", [12, 16])
def test_a_run_whose_model_is_lost_makes_another(
    capsys, few, whole, tmp_path, lost, steps
):
    """Of the weights it goes on from, if no updates are left."""
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    for path in out.iterdir():
        if path.name != "checkpoint.pt" and lost in (path.name, "all"):
            path.unlink()
    command = training_command(few, out, steps, *LEVERS, "--resume")
    status, _, errors = run(capsys, *command)
    assert status == 0 and "the best model so far is missing" in errors
    facts = book.load_description(out)
    assert facts["step"] in (12, 16)
    assert f"validation BLEU {facts['val_bleu']:.2f}" in errors
    book.load_translator(out)
    status, _, errors = run(capsys, *command)
    assert status == 0 and "missing" not in errors


def test_no_file_is_blamed_that_may_be_as_it_was(capsys, few, small, tmp_path):
    """Of the texts a run knows its own sum; the files' are in the cache."""
    corpus, cache = tmp_path / "corpus", tmp_path / "cache"
    shutil.copytree(few, corpus)
    first = training_command(corpus, tmp_path / "first", 1, "--cache", cache)
    assert run(capsys, *first)[0] == 0
    with (corpus / "train.en").open("a", encoding="utf-8") as file:
        file.write("one more\n")
    with (corpus / "train.de").open("a", encoding="utf-8") as file:
        file.write("einer mehr\n")
    message = refused(capsys, *first, "--steps", 2, "--resume")
    assert "cannot resume, train.de and train.en changed since" in message
    other = training_command(corpus, tmp_path / "other", 1, "--cache", cache)
    assert run(capsys, *other)[0] == 0
    message = refused(capsys, *first, "--steps", 2, "--resume")
    assert "train.de or train.en, or which pairs are held out, ch" in message


def test_a_damaged_snapshot_can_be_deleted(capsys, few, whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    snapshot = out / "weights-000012.pt"
    snapshot.write_bytes(snapshot.read_bytes()[:1000])
    command = training_command(few, out, 16, *LEVERS, "--resume")
    message = refused(capsys, *command)
    assert f"{snapshot}: damaged" in message
    assert "delete it, and resume" in message
    snapshot.unlink()
    status, _, errors = run(capsys, *command)
    assert status == 0 and "mean of the last 2 checkpoints" in errors


def test_a_run_of_another_device_can_go_on_by_its_weights(
    capsys, few, whole, tmp_path
):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    torch.save(state | {"device": "cuda"}, out / "checkpoint.pt")
    message = refused(
        capsys, *training_command(few, out, 16, *LEVERS, "--resume")
    )
    assert "began on --device cuda" in message
    assert f"(--from {out} goes on from its weights)" in message


def test_a_run_that_ends_at_rate_0_has_that_end(capsys, few, small, tmp_path):
    """Else the rate would jump from nothing to a part of its peak."""
    out, linear = tmp_path / "out", ["--decay", "linear"]
    trained(few, out, 2, *linear)
    before = contents(out)
    command = training_command(few, out, 4, *linear, "--resume")
    message = refused(capsys, *command)
    assert " steps has changed" in message and str(out) in message
    assert contents(out) == before


@pytest.mark.parametrize("decay", ["linear", "root"])
@pytest.mark.parametrize("steps, falls", [(2, False), (3, True)])
def test_a_run_that_is_all_warm_up_says_so(
    capsys, few, small, tmp_path, steps, falls, decay
):
    how = ["--decay", decay, "--warmup", 3]
    command = training_command(few, tmp_path / "out", steps, *how)
    status, _, errors = run(capsys, *command)
    assert status == 0 and ("the rate will not reach" in errors) is not falls


@pytest.mark.parametrize(
    "one, other",
    [
        ([], ["--r-drop", 1]),
        (["--r-drop", 1], ["--r-drop", 5]),
        ([], ["--dropout", 0.5]),
        ([], ["--attention-dropout", 0.5]),
        ([], ["--norm-first"]),
        ([], ["--half"]),
        ([], ["--factor", 2]),
        ([], ["--warmup", 5]),
        ([], ["--batch-tokens", 200]),
        (["--pieces", 150], ["--pieces", 150, "--bpe-dropout", 0.5]),
        (["--pieces", 150], ["--pieces", 150, "--both"]),
        (["--warmup", 1], ["--warmup", 1, "--decay", "linear"]),
    ],
    ids=lambda options: " ".join(map(str, options)) or "plain",
)
def test_no_lever_is_ignored(few, small, tmp_path, one, other):
    runs = [
        checkpoint(trained(few, tmp_path / name, 3, *options))["model"]
        for name, options in (("one", one), ("other", other))
    ]
    if one and "--both" in other:  # the tags are two words more
        assert len(runs[0]) == len(runs[1])
    assert not same(*runs)


def test_the_moving_average_is_what_is_kept(few, small, tmp_path):
    out = trained(few, tmp_path / "out", 3, "--ema", 0.9, "--save-every", 3)
    moving = checkpoint(out)["moving"]
    assert not same(weights(out), checkpoint(out)["model"])
    kept = book.load_translator(out).model.parameters()
    assert same([*moving], [weight.detach() for weight in kept])


def test_compile_reaches_the_model(few, small, tmp_path, monkeypatch, capsys):
    """What torch.compile makes of it is torch's; here it is only called."""
    compiled = []

    def watched(function, **how):
        compiled.append((function, how))
        return function

    monkeypatch.setattr(torch, "compile", watched)
    monkeypatch.setattr(book, "check_compiler", lambda device: None)
    trained(few, tmp_path / "plain", 1)
    assert not compiled
    trained(few, tmp_path / "compiled", 1, "--compile")
    [(states, how), (of_slice, _)] = compiled
    assert states is book.Transformer.states and how["dynamic"]
    assert of_slice is book.plain_slice_of_loss
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    command = training_command(few, tmp_path / "none", 1, "--compile")
    assert "C++ compiler" in refused(capsys, *command)
    with pytest.raises(book.InputError, match="C compiler"):
        book.check_compiler(torch.device("cuda"))


@pytest.mark.parametrize("there, named, found", [
    (["g++"], None, True), (["clang++"], None, False),
    (["clang++"], "clang++", True), (["clang++", "g++"], "other", False),
])  # fmt: skip
def test_the_compiler_asked_for_is_the_one_that_torch_takes(
    there, named, found, monkeypatch
):
    """On Linux g++, or what CXX names: no other is tried."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name in there)
    monkeypatch.delenv("CXX", raising=False)
    if named:
        monkeypatch.setenv("CXX", named)
    if found:
        book.check_compiler(torch.device("cpu"))
    else:
        with pytest.raises(book.InputError, match=named or "g\\+\\+"):
            book.check_compiler(torch.device("cpu"))


def test_a_run_that_began_meanwhile_is_not_written_over(
    capsys, few, small, tmp_path, monkeypatch
):
    """While this one still read the corpus, say for minutes."""
    out, prepare = tmp_path / "out", book.prepare_training

    def slowly(*arguments):
        prepared = prepare(*arguments)
        (out / "checkpoint.pt").write_bytes(b"precious")
        return prepared

    monkeypatch.setattr(book, "prepare_training", slowly)
    message = refused(capsys, *training_command(few, out, 2))
    assert f"{out} holds a model already" in message
    assert (out / "checkpoint.pt").read_bytes() == b"precious"
    assert not (out / "log.jsonl").exists()


@pytest.mark.parametrize("change, possible", [
    (["--warmup", 7], True), (["--layers", 2], False),
])  # fmt: skip
def test_only_a_remedy_that_can_be_followed_is_named(
    capsys, few, small, tmp_path, change, possible
):
    """By --from a model may get another rate, but not other sizes."""
    out = trained(few, tmp_path / "out", 2)
    command = training_command(few, out, 2, *change)
    message = refused(capsys, *command, "--resume")
    assert ("--from" in message) is possible
    command = training_command(few, tmp_path / "new", 2, *change)
    status, _, _ = run(capsys, *started_from(out, command))
    assert (status == 0) is possible


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"compile": True}, "--compile"),
        ({"r_drop": 5.0}, "--r-drop"),
        ({"bpe_dropout": 0.1}, "--bpe-dropout"),
        ({"max_tokens": 500}, "--max-tokens 1000"),
        ({"max_tokens": 500, "resume": True}, "go on without --record"),
        ({"device": "cpu"}, "NVIDIA GPU"),
        ({"processes": 2}, "several processes"),
    ],
)
def test_what_cannot_be_recorded_is_refused(changes, named, monkeypatch):
    number = changes.pop("processes", 1)
    monkeypatch.setattr(book, "place", lambda: (0, number))
    facts = dict(batch_tokens=1000, max_tokens=1000) | changes
    device = torch.device(facts.pop("device", "cuda"))
    args = types.SimpleNamespace(compile=facts.pop("compile", False))
    args.resume = facts.pop("resume", False)
    with pytest.raises(book.InputError, match=named):
        book.check_record(args, device, book.Recipe(**facts))


def test_a_gpu_records_and_a_processor_says_that_it_cannot(
    few, small, tmp_path, monkeypatch, capsys
):
    command = training_command(few, tmp_path / "out", 1, "--record")
    assert "--record needs an NVIDIA GPU, not cpu" in refused(capsys, *command)
    recorded, record = [], book.as_graph

    def watched(work, *where):
        recorded.append(work)
        return record(work, *where)

    monkeypatch.setattr(book, "check_record", lambda *facts: None)
    monkeypatch.setattr(book, "as_graph", watched)
    trained(few, tmp_path / "plain", 3)
    assert not recorded
    options = "--save-every", 21, "--ema", 0.9, "--dropout", 0
    out = trained(few, tmp_path / "out", 40, "--record", *options)
    assert recorded
    plain = trained(few, tmp_path / "usual", 40, *options)
    assert checkpoint(out)["optimizer"]["state"][0]["step"] == 40
    told, usual = map(book.read_log, (out, plain))
    assert [e["step"] for e in told] == [20, 21, 40, 40, 40]
    for one, two in zip(told, usual, strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"tokens_per_second", "seconds"}:
            assert one[name] == pytest.approx(two[name], rel=1e-4)


# -------------------------------------------------- which weights are kept


def test_of_both_directions_the_mean_decides(
    few, small, tmp_path, monkeypatch
):
    pairs = book.read_pairs(few, "val", "de", "en")
    seen, scores = [], iter([10, 20])

    def bleu(outputs, references, language):
        seen.append((list(outputs), list(references), language))
        return types.SimpleNamespace(score=next(scores))

    monkeypatch.setattr(book, "bleu", bleu)
    asked, real = [], book.Translator.translate

    def watched(self, texts, *how):
        asked.append((self.src, self.tgt, list(texts)))
        return real(self, texts, *how)

    monkeypatch.setattr(book.Translator, "translate", watched)
    out = tmp_path / "out"
    how = ["--pieces", 150, "--both", "--average", 1]
    trained(few, out, 1, *how)
    german, english = map(list, zip(*pairs))
    assert asked == [("de", "en", german), ("en", "de", english)]
    assert [how for _, *how in seen] == [[english, "en"], [german, "de"]]
    assert read_scores(out) == [15]
    assert book.load_description(out)["val_bleu"] == 15


@pytest.mark.parametrize(
    "average, kept", [(3, "04 05 06"), (1, "06"), (99, None)]
)
def test_only_the_last_snapshots_stay(few, small, tmp_path, average, kept):
    out = tmp_path / "out"
    trained(few, out, 6, *LEVERS, "--save-every", 1, "--average", average)
    kept = "01 02 03 04 05 06" if kept is None else kept
    assert sorted(path.name for path in out.glob("weights-*")) == [
        f"weights-0000{number}.pt" for number in kept.split()
    ]


def test_only_snapshots_are_snapshots(few, small, tmp_path):
    """A file of the user's own is neither removed nor averaged in."""
    out = tmp_path / "out"
    details = *LEVERS, "--save-every", 1, "--average", 2
    trained(few, out, 3, *details)
    own = out / "weights-best.pt"
    own.write_text("mine", encoding="utf-8")
    kept = [out / f"weights-00000{n}.pt" for n in (2, 3)]
    assert book.snapshots(out) == kept
    later = out / "weights-1000000.pt"
    later.write_bytes(kept[0].read_bytes())
    assert book.snapshots(out) == [*kept, later]
    assert book.snapshots(out, 3) == kept
    assert book.snapshots(out, 2) == kept[:1]
    resume(few, out, 5, *details)
    assert own.read_text("utf-8") == "mine"
    assert [p.name for p in book.snapshots(out)] == [
        "weights-000004.pt", "weights-000005.pt"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "place, name, other",
    [(os, "getpid", 2), (book.socket, "gethostname", "another container")],
)
def test_two_processes_may_write_one_file(
    tmp_path, monkeypatch, place, name, other
):
    path = tmp_path / "pairs.pt"

    def write(unfinished):
        with unfinished.open("w", encoding="utf-8") as file:
            file.write("who")  # and meanwhile another writes all of it
            with monkeypatch.context() as patch:
                patch.setattr(place, name, lambda: other)
                book.write_whole(path, lambda p: p.write_text("its", "utf-8"))
            file.write("le")

    book.write_whole(path, write)
    assert path.read_text("utf-8") == "whole"
    assert [*tmp_path.iterdir()] == [path]


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    folder = tmp_path / "folder"
    (folder / "full").mkdir(parents=True)
    with pytest.raises(OSError):
        book.write_whole(folder, lambda p: p.write_text("x", "utf-8"))
    assert [*tmp_path.iterdir()] == [folder]


def test_what_a_kill_left_unfinished_is_removed(few, small, tmp_path):
    out = tmp_path / "out"
    trained(few, out, 2, *LEVERS)
    (out / "checkpoint.pt.123.part").write_text("half", encoding="utf-8")
    # Of a run whose --cache this is, and of another program:
    others = {out / "pairs.pt.123.part", out / "film.mkv.part"}
    for other in others:
        other.write_text("half", encoding="utf-8")
    resume(few, out, 3, *LEVERS)
    assert set(out.glob("*.part")) == others


def test_a_run_of_before_validation_text_was_noted_can_go_on(
    few, small, tmp_path
):
    out = tmp_path / "out"
    trained(few, out, 2, *LEVERS)
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    facts = json.loads(state["description"])
    del facts["val"]
    state["description"] = json.dumps(facts)
    torch.save(state, out / "checkpoint.pt")
    resume(few, out, 3, *LEVERS)
    assert checkpoint(out)["step"] == 3


def test_two_runs_that_write_one_cache_are_told_apart(
    capsys, few, small, tmp_path, monkeypatch
):
    """Another run replaces the file between writing it and reading it."""
    one, other = tmp_path / "one", tmp_path / "other"
    trained(few, other, 1, "--pieces", 140)
    real = book.write_whole

    def write_whole(path, write):
        real(path, write)
        if path.name == "pairs.pt":
            shutil.copy(other / "pairs.pt", path)

    monkeypatch.setattr(book, "write_whole", write_whole)
    command = training_command(few, one, 1, "--pieces", 150)
    assert "another run has just written" in refused(capsys, *command)


def read_scores(folder):
    return [e["val_bleu"] for e in book.read_log(folder) if "val_bleu" in e]


def script_bleu(monkeypatch, scores):
    """Let the validations get these scores, one after the other."""
    scores = iter(scores)

    def bleu(*_, **__):
        return types.SimpleNamespace(score=next(scores))

    monkeypatch.setattr(book, "bleu", bleu)


PLAIN = ["--dropout", 0.2, "--save-every", 1]


@pytest.mark.parametrize(
    "scores, best", [([5, 9, 7, 8], 2), ([1, 2, 3, 4], 4), ([9, 1, 1, 1], 1)]
)
def test_weights_are_the_best_on_validation(
    few, small, tmp_path, monkeypatch, scores, best
):
    script_bleu(monkeypatch, [*scores, 0])  # the average is no good
    out = trained(few, tmp_path / "out", 4, *PLAIN)
    kept = torch.load(out / f"weights-{best:06}.pt", weights_only=True)
    assert same(weights(out), kept)
    facts = book.load_description(out)
    assert (facts["step"], facts["val_bleu"]) == (best, max(scores))
    assert read_scores(out) == scores


@pytest.mark.parametrize(
    "losses, best", [([3, 1, 2, 2], 2), ([3, 2, 2, 1], 4), ([2, 1, 1, 3], 3)]
)
def test_of_equal_scores_the_lower_loss_decides(
    few, small, tmp_path, monkeypatch, losses, best
):
    """Of equal losses too, the later weights; also in a resumed run."""
    script_bleu(monkeypatch, [0, 0, 0])
    script_losses(monkeypatch, [*losses[:2], 9])  # the average is no good
    out = trained(few, tmp_path / "out", 2, *PLAIN)
    script_bleu(monkeypatch, [0, 0, 0])
    script_losses(monkeypatch, [*losses[2:], 9])
    resume(few, out, 4, *PLAIN)
    kept = torch.load(out / f"weights-{best:06}.pt", weights_only=True)
    assert same(weights(out), kept)
    facts = book.load_description(out)
    assert facts["step"] == best and "averaged" not in facts


def script_losses(monkeypatch, losses):
    """Let the validations find these losses, and one of training text each."""
    found = iter([math.exp(x) for loss in losses for x in (loss, 1)])
    monkeypatch.setattr(book, "perplexity", lambda *_: next(found))


def test_a_resumed_run_remembers_its_best(few, small, tmp_path, monkeypatch):
    script_bleu(monkeypatch, [9, 1, 0])
    out = trained(few, tmp_path / "out", 2, *PLAIN)
    before = weights(out)
    script_bleu(monkeypatch, [8, 7, 0])
    resume(few, out, 4, *PLAIN)
    assert same(weights(out), before)
    assert book.load_description(out)["step"] == 1


def test_the_mean_of_the_snapshots_is_a_candidate(
    few, small, tmp_path, monkeypatch
):
    script_bleu(monkeypatch, [5, 9, 7, 8, 10])
    out = tmp_path / "out"
    trained(few, out, 4, *PLAIN, "--average", 3, "--pieces", 150)
    last = [
        torch.load(out / f"weights-{n:06}.pt", weights_only=True)
        for n in (2, 3, 4)
    ]
    kept = weights(out)
    assert book.load_description(out)["averaged"] == 3
    for name, weight in kept.items():
        mean = sum(state[name].double() for state in last) / 3
        torch.testing.assert_close(weight.double(), mean)
    assert not same(kept, last[-1])
    model = book.load_translator(out).model
    assert model.src_embedding.weight is model.tgt_embedding.weight
    assert same(checkpoint(out)["model"], last[-1])  # training is as it was
    [entry] = [e for e in book.read_log(out) if "average_val_bleu" in e]
    assert (entry["step"], entry["average_val_bleu"]) == (4, 10)


def test_a_mean_whose_validation_is_broken_off_is_not_gone_on_with(
    few, small, tmp_path, monkeypatch
):
    """In a notebook the run may be saved after that."""
    validate, broken = book.validate, []

    def broken_off(run, *others):
        if len(others) == 6 and others[-1]:  # of a mean
            broken.append(run)
            raise KeyboardInterrupt
        return validate(run, *others)

    monkeypatch.setattr(book, "validate", broken_off)
    out, how = tmp_path / "out", [*PLAIN, "--ema", 0.5]
    command = training_command(few, out, 2, *how)
    assert book.main([*map(str, command)]) == 128 + signal.SIGINT
    [run] = broken
    saved = checkpoint(out)
    assert run.moving is not None
    assert same(dict(run.model.state_dict()), saved["model"])


def test_the_mean_of_the_snapshots_is_no_moving_average(
    few, small, tmp_path, monkeypatch
):
    script_bleu(monkeypatch, [5, 6, 10])
    out = trained(few, tmp_path / "out", 2, *PLAIN, "--ema", 0.5)
    assert book.load_description(out)["averaged"] == 2
    one, two = (torch.load(p, weights_only=True) for p in book.snapshots(out))
    mean = {name: (one[name].double() + two[name]) / 2 for name in one}
    for name, weight in weights(out).items():
        torch.testing.assert_close(weight.double(), mean[name])


def test_the_seconds_of_all_updates_are_added_up(
    few, small, tmp_path, monkeypatch
):
    """Those before a stop, too: the tables' minutes are made of them."""
    training = book.training

    def slow(*arguments):
        for update in training(*arguments):
            yield update._replace(seconds=2.0)

    monkeypatch.setattr(book, "training", slow)
    how = ["--save-every", 3]
    out = trained(few, tmp_path / "out", 3, *how)
    resume(few, out, 5, *how)
    found = [e["seconds"] for e in book.read_log(out) if "loss" in e]
    assert found == [6, 10]


def test_the_seed_orders_the_batches(few, small, tmp_path, monkeypatch):
    asked, real = set(), book.epoch_batches

    def watched(widths, most, seed, epoch):
        asked.add(seed)
        return real(widths, most, seed, epoch)

    monkeypatch.setattr(book, "epoch_batches", watched)
    trained(few, tmp_path / "plain", 1, "--seed", 7)
    assert asked == {7}
    asked.clear()
    monkeypatch.setattr(book, "check_record", lambda *facts: None)
    trained(few, tmp_path / "recorded", 1, "--seed", 7, "--record")
    assert asked == {7}


class Killed(BaseException):
    """In place of a signal."""


def test_a_run_cut_short_has_its_mean_examined_too(
    few, small, tmp_path, monkeypatch
):
    out, details = tmp_path / "out", [*PLAIN, "--average", 2]
    save = book.Run.save

    def save_and_die(run, folder, due=False):
        save(run, folder, due)
        if run.step == 3 and not due:
            raise Killed

    script_bleu(monkeypatch, [5, 9, 7])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(book.Run, "save", save_and_die)
        trained(few, out, 5, *details)
    later = torch.load(out / "weights-000003.pt", weights_only=True)
    later = {name: weight + 1 for name, weight in later.items()}
    torch.save(later, out / "weights-000004.pt")  # of the longer run
    script_bleu(monkeypatch, [10])
    resume(few, out, 3, *details)
    [entry] = [e for e in book.read_log(out) if "average_val_bleu" in e]
    assert (entry["step"], entry["average_val_bleu"]) == (3, 10)
    two, three = (
        torch.load(out / f"weights-{n:06}.pt", weights_only=True)
        for n in (2, 3)
    )
    mean = {name: (two[name].double() + three[name]) / 2 for name in two}
    for name, weight in weights(out).items():
        torch.testing.assert_close(weight.double(), mean[name])
    script_bleu(monkeypatch, [])  # a second time, nothing is examined
    resume(few, out, 3, *details)


def test_with_a_moving_average_that_is_what_is_kept(
    few, small, tmp_path, monkeypatch
):
    script_bleu(monkeypatch, [5, 9, 0])
    out = tmp_path / "out"
    trained(few, out, 2, *PLAIN, "--ema", 0.5)
    state = checkpoint(out)
    model = book.load_translator(out).model
    assert same([w.detach() for w in model.parameters()], state["moving"])
    last = torch.load(out / "weights-000002.pt", weights_only=True)
    assert same(last, state["model"])
    assert not same(weights(out), last)


def test_training_never_looks_at_the_test_set(
    corpus, small, tmp_path, monkeypatch
):
    assert (corpus / "test.de").exists()
    read, seen = book.Lines.__iter__, set()

    def watched(lines):
        seen.add(lines.path.name)
        return read(lines)

    monkeypatch.setattr(book.Lines, "__iter__", watched)
    trained(corpus, tmp_path / "out", 1)
    assert seen == {"train.de", "train.en", "val.de", "val.en"}


# ------------------------------------------------------------------ the log


def test_the_log_says_what_happened(few, small, tmp_path):
    out = trained(few, tmp_path / "out", 45, "--save-every", 15)
    text = (out / "log.jsonl").read_text("utf-8")
    entries = [json.loads(line) for line in text.splitlines()]
    assert entries == book.read_log(out)
    losses = {e["step"]: e["loss"] for e in entries if "loss" in e}
    assert list(losses) == [20, 40, 45]
    assert 2 < losses[40] < losses[20] < 9
    for e in entries:
        if "loss" in e:
            rate = book.learning_rate(e["step"], 16, 2000, 2.53)
            assert math.isclose(e["rate"], rate)
            assert e["tokens_per_second"] > 0
    scores = {e["step"]: e["val_bleu"] for e in entries if "val_bleu" in e}
    assert list(scores) == [15, 30, 45]
    assert all(e["val_loss"] > 0 for e in entries if "val_bleu" in e)


@pytest.mark.parametrize("levers", [(), ("--ema", 0.5)])
def test_training_text_is_measured_like_validation(
    few, small, tmp_path, levers
):
    options = "--save-every", 2, "--average", 1, *levers
    out = trained(few, tmp_path / "out", 6, *options)
    best = book.load_description(out)["step"]
    entries = [e for e in book.read_log(out) if "val_bleu" in e]
    [entry] = [e for e in entries if e["step"] == best]
    translator = book.load_translator(out)
    for part, name in (("train", "train_loss"), ("val", "val_loss")):
        files = [few / f"{part}.{language}" for language in ("de", "en")]
        texts = zip(*(f.read_text("utf-8").splitlines() for f in files))
        pairs = book.encode_all(translator, list(texts))
        expected = math.log(book.perplexity(translator.model, pairs))
        assert math.isclose(entry[name], expected, rel_tol=1e-5)
    assert entry["train_loss"] != entry["val_loss"]


def test_pairs_that_are_measured_are_spread_over_the_whole():
    assert book.spread(range(10), 4) == [0, 2, 5, 7]
    assert book.spread("abc") == ["a", "b", "c"]
    assert book.spread([]) == []
    chosen = book.spread(range(4_500_001))
    assert len(set(chosen)) == 1000 and chosen[-1] > 4_490_000


def test_steps_of_the_log_never_go_back(few, small, tmp_path):
    out = trained(few, tmp_path / "out", 4, *LEVERS)
    with (out / "log.jsonl").open("a", encoding="utf-8") as file:
        for step in (5, 6, 7):  # from updates that no checkpoint has seen
            file.write(json.dumps({"step": step, "loss": 9.0}) + "\n")
    resume(few, out, 8, *LEVERS)
    steps = [entry["step"] for entry in book.read_log(out)]
    assert steps == sorted(steps)
    assert not {5, 6, 7} & set(steps) and steps[-1] == 8


@pytest.mark.parametrize("kept", [1, 9, 30])
def test_a_last_line_that_was_cut_off_is_no_error(
    capsys, few, small, tmp_path, kept
):
    out = trained(few, tmp_path / "out", 4, *LEVERS)
    path = out / "log.jsonl"
    *lines, last = path.read_text("utf-8").splitlines(keepends=True)
    path.write_text("".join(lines) + last[:kept], encoding="utf-8")
    assert len(book.read_log(out)) == len(lines)
    resume(few, out, 8, *LEVERS)
    for line in path.read_text("utf-8").splitlines():
        json.loads(line)


@pytest.mark.parametrize("line", ["{", "nonsense", "", "5", '{"loss": 1}'])
def test_a_damaged_line_in_the_middle_is_named(
    capsys, few, small, tmp_path, line
):
    out = trained(few, tmp_path / "out", 8, *LEVERS)
    path = out / "log.jsonl"
    lines = path.read_text("utf-8").splitlines()
    lines[1:1] = [line]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    arguments = training_command(few, out, 12, *LEVERS, "--resume")
    message = refused(capsys, *arguments)
    assert f"{path}, line 2" in message


def test_a_log_that_is_not_utf_8_is_named(capsys, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n\xff\xfe\n{"step": 2}\n')
    out = tmp_path / "curves.svg"
    message = refused(capsys, "curves", "--model", tmp_path, "--out", out)
    assert f"{path}, line 2: damaged; delete that line" in message


# -------------------------------------------------------------- TensorBoard


def test_tensorboard_is_asked_for_before_anything_is_computed(
    capsys, few, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setattr(book, "training_pairs", None)  # would not get so far
    out = tmp_path / "out"
    arguments = training_command(few, out, 2, "--tensorboard")
    assert "pip install tensorboard" in refused(capsys, *arguments)
    assert not out.exists()


class Writer:
    """In the place of TensorBoard's; remembers what it is told."""

    all: list = []

    def __init__(self, folder, **how):
        self.folder, self.how = Path(folder), how
        self.values, self.waiting = [], []
        Writer.all.append(self)

    def add_scalar(self, name, value, step):
        self.waiting.append((step, name, value))

    def flush(self):
        self.values += self.waiting
        self.waiting = []

    def close(self):
        """Writes the rest; but a kill comes before it."""


def test_values_of_the_log_reach_tensorboard(
    few, small, tmp_path, monkeypatch
):
    stub = types.ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    monkeypatch.setattr(Writer, "all", [])
    out = tmp_path / "out"
    trained(few, out, 20, *LEVERS, "--tensorboard")
    trained(few, out, 24, *LEVERS, "--tensorboard", "--resume")
    logged = [
        (entry["step"], name, value)
        for entry in book.read_log(out)
        for name, value in entry.items()
        if name != "step"
    ]
    assert {"loss", "rate", "val_bleu"} <= {name for _, name, _ in logged}
    assert [writer.folder for writer in Writer.all] == [out, out]
    assert Writer.all[1].how["purge_step"] == 21
    told = [v for w in Writer.all for v in w.values + w.waiting]
    assert told == logged
    # What is not flushed at once would be lost if the process were killed.
    assert all(writer.waiting == [] for writer in Writer.all)


# --------------------------------------------------- a corpus of one's own

SUBJECTS = {"고양이": "the cat", "개": "the dog", "학생": "the student"}
OBJECTS = {"물": "water", "책": "a book", "빵": "bread", "사과": "an apple"}
KOREAN = [
    (f"{a}는 {when}{b}을 좋아합니다.", f"{x} likes {y}{today}.")
    for a, x in SUBJECTS.items()
    for b, y in OBJECTS.items()
    for when, today in (("", ""), ("오늘 ", " today"))
]


@pytest.fixture(scope="module")
def korean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("korean")
    parts = {"train": KOREAN, "val": KOREAN, "test": KOREAN[:4]}
    for part, pairs in parts.items():
        for language, side in zip(("ko", "en"), zip(*pairs)):
            text = "".join(f"{line}\n" for line in side)
            path = folder / f"{part}.{language}"
            path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def korean_model(korean, tmp_path_factory):
    """A model that has learned its few sentences by heart."""
    out = tmp_path_factory.mktemp("korean-model") / "run"
    details = (
        "--src", "ko", "--tgt", "en", "--pieces", 90, "--norm-first",
        "--dropout", 0, "--warmup", 40, "--factor", 0.5, "--save-every", 150,
        "--d-model", 32, "--d-ff", 64,
    )  # fmt: skip
    return trained(korean, out, 150, *details)  # 100 is just too few


def test_a_korean_corpus_is_learned_and_used_in_a_fresh_process(
    korean, korean_model
):
    texts = [ko for ko, _ in KOREAN[:6]]
    done = fresh(
        "translate", "--model", korean_model, "--device", "cpu",
        text="".join(f"{line}\n" for line in texts).encode(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    outputs = done.stdout.decode().splitlines()
    assert outputs == [en for _, en in KOREAN[:6]]
    assert b"unknown" not in done.stderr


def test_a_korean_letter_that_was_never_seen_is_named(capsys, korean_model):
    arguments = ["--model", korean_model, "--device", "cpu", "뿔은 책을"]
    status, output, errors = run(capsys, "translate", *arguments)
    assert status == 0 and output.count("\n") == 1
    [line] = [row for row in errors.splitlines() if "unknown" in row]
    assert "뿔" in line and "책" not in line


def test_the_vocabulary_of_another_model_is_noticed(
    capsys, korean_model, whole, tmp_path
):
    out = Path(shutil.copytree(korean_model, tmp_path / "copy"))
    other = (whole / "pieces.model").read_bytes()
    for content in (other, b"", None):
        (out / "pieces.model").unlink()
        if content is not None:
            (out / "pieces.model").write_bytes(content)
        arguments = ["translate", "--model", out, "--device", "cpu", "개"]
        message = refused(capsys, *arguments)
        assert str(out / "pieces.model") in message
        (out / "pieces.model").write_bytes(b"")


# -------------------------------------------------------- sixteen-bit copies


@pytest.mark.parametrize("half", [False, True])
def test_each_layer_is_saved_whole_or_in_16_bits(tmp_path, half):
    words = book.Vocabulary(book.DIGITS)
    model = book.tiny_model()  # of two layers
    translator = book.Translator(model, (words, words), ("de", "en"))
    book.save_translator(translator, tmp_path / "out", half)
    kind = torch.float16 if half else torch.float32
    wanted = {name: w.to(kind) for name, w in model.state_dict().items()}
    assert same(dict(weights(tmp_path / "out")), wanted)
    again = book.load_translator(tmp_path / "out").model.state_dict()
    assert same(dict(again), {name: w.float() for name, w in wanted.items()})


def test_half_the_bits_are_saved_and_loaded_as_whole_numbers(
    korean_model, tmp_path
):
    translator = book.load_translator(korean_model)
    for name, half in (("whole", False), ("half", True)):
        book.save_translator(translator, tmp_path / name, half)
    saved = weights(tmp_path / "half")
    assert {w.dtype for w in saved.values()} == {torch.float16}
    sizes = [
        os.path.getsize(tmp_path / name / "weights.pt")
        for name in ("whole", "half")
    ]
    assert sizes[1] < 0.6 * sizes[0]  # some bytes are of no weight
    again = book.load_translator(tmp_path / "half")
    assert {w.dtype for w in again.model.parameters()} == {torch.float32}
    model = again.model
    assert model.src_embedding.weight is model.tgt_embedding.weight
    assert same(model.state_dict(), {k: w.float() for k, w in saved.items()})
    texts, wanted = map(list, zip(*KOREAN))
    assert again.translate(texts) == translator.translate(texts) == wanted
