"""What the tests of the command line and of long runs share."""

import contextlib
import functools
import importlib
import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import annotated_transformer as book

SCRIPT = Path(book.__file__)
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


def needed(name, where="tests/peers.txt"):
    """Import a package of `where`; skip without it, but not in CI."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"needs {where}")


def writers_made(monkeypatch):
    """The arguments of each Writer that is made from now on, in a list."""
    made, real = [], book.Writer
    monkeypatch.setattr(
        book, "Writer", lambda *how: made.append(how) or real(*how)
    )
    return made


def fresh(*arguments, text=None, **options):
    """Run the script in a process of its own."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        input=text, capture_output=True, timeout=300,
        env=ONE_THREAD, **options,
    )  # fmt: skip


@contextlib.contextmanager
def little_room(most):
    """Let no file grow beyond so many bytes, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def run(capsys, *arguments):
    """Run a command here: (exit status, standard output, error output)."""
    capsys.readouterr()
    status = book.main([*map(str, arguments)])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def refused(capsys, *arguments):
    """The error message of a command that must refuse its input."""
    status, output, errors = run(capsys, *arguments)
    assert status == 2
    assert output == "" and "Traceback" not in errors
    lines = errors.splitlines()
    [start] = [i for i, row in enumerate(lines) if row.startswith("error: ")]
    return "\n".join(lines[start:])


def contents(folder):
    """{file name: bytes} of all that is in a folder."""
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def weights(folder):
    """The weights that a folder's model translates with."""
    return torch.load(folder / "weights.pt", weights_only=True)


def tensors(path):
    """What a file of tensors holds."""
    return torch.load(path, weights_only=True)


def checkpoint(folder):
    """All that the next update depends on; not the time it took."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    step, _, best, loss = state.pop("numbers")
    return state | {"step": step, "best": best, "best_loss": loss}


def same(one, other):
    """Whether two trees of tensors and numbers are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[name], other[name]) for name in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_same_run(out, whole):
    """Every file of weights is equal, bit for bit, and the checkpoint."""
    assert sorted(contents(out)) == sorted(contents(whole))
    assert same(checkpoint(out), checkpoint(whole))
    for path in whole.glob("weights*.pt"):
        assert same(*(tensors(f / path.name) for f in (out, whole)))


# What lasts does not depend on sizes, but the time does.
SIZES = ["--layers", 1, "--d-model", 16, "--d-ff", 16, "--heads", 2]


def training_command(corpus, out, steps, *more):
    """A run on whole words; of an option given twice the later counts.

    What pays is measured, and may change under load: so it is said here.
    """
    return [
        "train", "--corpus", corpus, "--out", out, "--steps", steps,
        "--save-every", 100, "--pieces", 0, "--device", "cpu",
        "--no-onednn", *SIZES, *more,
    ]  # fmt: skip


def started_from(folder, command):
    """The command, with --from and without what is the model's own."""
    command = [*command, "--from", folder]
    for option in ("--pieces", *SIZES[::2]):
        at = command.index(option)
        del command[at : at + 2]
    return command


def write_little(patch):
    """Cut what untrained models write, who do not know an end, short."""
    patch.setattr(book, "greedy", functools.partial(book.greedy, extra=5))


def trained(corpus, out, *details):
    """The folder of a run that must succeed."""
    arguments = training_command(corpus, out, *details)
    with contextlib.redirect_stderr(io.StringIO()):
        assert book.main([*map(str, arguments)]) == 0
    return out
