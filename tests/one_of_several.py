"""What torchrun starts in test_distributed.py: the book, made very small.

`one_of_several.py train …` is the command line. With KILL="1@6 0@10" the
process of rank 1 kills itself after update 6, and once all were started anew,
that of rank 0 after update 10 (with SIGNAL=15, by SIGTERM, which asks it to
stop). DIE="FILE 1@6 0@10" does the same and makes FILE-6 and FILE-10, and
HALT="FILE 1@6" lets that process stand still. With WATCH=FOLDER each process
writes there, at its end, which files it has opened for writing, and which of
its threads still belong to the group. With LINGER=2 the process of rank 0,
once it has failed, hangs up and takes two seconds more to end.

`one_of_several.py probe FOLDER train …` first computes gradients in several
ways, and writes what it found to FOLDER, a file for each rank.
"""

import contextlib
import json
import operator
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import torch

import annotated_transformer as book

SMALL = dict(N=1, d_model=16, d_ff=16, h=2, dropout=0.1)


def without_compiler():
    """Do not load torch's compiler, which takes longer than all else here.

    DistributedDataParallel only asks it for a setting, and for functions
    that are not to be compiled; and autograd asks it whether two shapes are
    equal. In `probe` both do so as everywhere.
    """
    sys.modules["torch._dynamo"] = mock.MagicMock(
        disable=lambda function, *_, **__: function
    )
    sys.modules["torch.fx.experimental.symbolic_shapes"] = mock.MagicMock(
        sym_eq=operator.eq, expect_true=bool
    )


def kill_in_time():
    """Let this process die where KILL says."""
    kills = os.environ.get("KILL", "").split()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt >= len(kills):
        return
    rank, step = kills[attempt].split("@")
    if rank != os.environ["RANK"]:
        return
    training = book.training

    def mortal(*arguments):
        for update in training(*arguments):
            yield update
            if update.step == int(step):
                number = os.environ.get("SIGNAL", signal.SIGKILL)
                os.kill(os.getpid(), int(number))

    book.training = mortal


def threads_of_group(patience=0):
    """The names of this process's threads that talk to others (on Linux).

    A thread that was joined may still be listed for a moment; `patience` is
    how many seconds it may take.
    """
    end = time.monotonic() + patience
    while True:
        names = []
        for task in Path("/proc/self/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # it has just ended
                names.append(task.read_text("utf-8").strip())
        names = [name for name in names if "gloo" in name]
        if not names or time.monotonic() >= end:
            return names
        time.sleep(0.01)


def stop_once():
    """Let this process die or stand still where DIE and HALT say.

    Machines count their restarts each for itself, so files tell what has
    happened already.
    """
    stops = []
    for how in ("DIE", "HALT"):
        file, *places = os.environ.get(how, "none").split()
        for rank, _, step in (place.partition("@") for place in places):
            stops.append((how, Path(f"{file}-{step}"), rank, int(step)))
    training = book.training

    def stopping(*arguments):
        for update in training(*arguments):
            yield update
            for how, file, rank, step in stops:
                if (os.environ["RANK"], step) != (rank, update.step):
                    continue
                if not file.exists():
                    file.touch()
                    if how == "DIE":
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(3600)

    if stops:
        book.training = stopping


@contextlib.contextmanager
def watching():
    """Note down which files are written."""
    folder, written = os.environ.get("WATCH"), []

    def watch(event, arguments):
        if event == "open":
            path, mode, flags = arguments
            if set(mode or "") & set("wax+") or flags & 3:
                written.append(str(path))
        elif event in ("os.rename", "os.remove"):  # torch.save is unseen
            written.extend(map(str, arguments[:2]))

    sys.addaudithook(watch)
    yield
    if folder:
        path = Path(folder) / f"written-{os.environ['RANK']}"
        path.write_text(json.dumps(written), encoding="utf-8")
        path = Path(folder) / f"left-{os.environ['RANK']}"
        path.write_text(json.dumps(threads_of_group(2)), encoding="utf-8")


def lengths_to_batch(lengths):
    rows = [torch.randint(4, 14, (n,)).tolist() for n in lengths]
    source = [[*row, book.EOS] for row in rows]
    target = [[book.BOS, *row, book.EOS] for row in rows]
    return book.Batch(book.pad(source), book.pad(target))


GRADIENTS = {
    "in slices": book.backward_in_slices,
    "half": partial(book.backward_in_slices, half=True),
    "r_drop": partial(book.backward_r_drop, alpha=2.0),
}
BATCHES = {  # lengths of the pairs in each part of an update
    "one part": [[12, 9, 7, 2, 1]],
    "three parts": [[12, 9], [8, 7, 7, 1], [3]],
    "a single pair": [[5]],
}


def gradient_of(model, gradient, parts):
    """The loss of an update and its gradient, as one vector."""
    model.zero_grad()
    tokens = sum(part.count() for part in parts)
    loss = sum(gradient(model, part, tokens, 0.1) for part in parts)
    weights = model.parameters()
    return float(loss), torch.cat([w.grad.flatten() for w in weights])


def probe(folder):
    """Compare what several processes find with what one finds."""
    rank, number = book.place()
    found = {"place": [rank, number]}
    for kind, gradient in GRADIENTS.items():
        for name, lengths in BATCHES.items():
            torch.manual_seed(0)
            model = book.tiny_model().double().train()
            parts = [lengths_to_batch(part) for part in lengths]
            loss, alone = gradient_of(model, gradient, parts)
            several = book.SharedGradient(model, gradient, len(parts))
            for _ in range(2):  # nothing is left over from the first time
                joint_loss, joint = gradient_of(model, several, parts)
            own = sum(book.share(p, rank, number).count() for p in parts)
            found[f"{kind}, {name}"] = {
                "difference": float((joint - alone).norm() / alone.norm()),
                "loss": [loss, joint_loss],
                "tokens": [own, sum(part.count() for part in parts)],
                "equal": all(map(joint.equal, book.everyone(joint))),
            }
    found["threads"] = threads_of_group()
    found["first"] = book.from_first(lambda: f"from {rank}")
    found["everyone"] = book.everyone(rank)
    found["shared"] = [
        book.shared(lambda part: [f"{rank}: {x}" for x in part], list(items))
        for items in ("abcde", "a", "")
    ]
    there = folder / "prepared"
    with book.one_goes_first():
        found["prepared before"] = there.exists()
        there.touch()
    text = json.dumps(found)
    (folder / f"found-{rank}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    book.PRESETS["tiny"] = SMALL
    book.greedy = partial(book.greedy, extra=5)  # as helpers.write_little
    arguments = sys.argv[1:]
    if arguments[0] == "probe":
        _, folder, *arguments = arguments
        run_command = book.run_command

        def probe_first(argv):
            probe(Path(folder))
            run_command(argv)

        book.run_command = probe_first
    else:
        without_compiler()
    kill_in_time()
    stop_once()
    with watching():
        status = book.main(arguments)
    if status and os.environ["RANK"] == "0" and "LINGER" in os.environ:
        book.dist.destroy_process_group()
        time.sleep(float(os.environ["LINGER"]))
    sys.exit(status)
