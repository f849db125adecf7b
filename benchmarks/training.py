"""How fast does training go, and how far is the limit? benchmarks/training.py

  peer      the same architecture from torch.nn.Transformer with cross_entropy
            and nn.Dropout, on the same batches, against ours, each in 32 and
            in 16 bits (the peer's by autocast) and with a fused Adam, in
            alternation: tiny (4,096 places) and base (1,024), both with
            V = 10,000, without padding; 16 bits are left out where a product
            in them takes more than four times as long
  kept      the same in a process whose C library keeps the memory that a
            tensor gives back, instead of asking the system anew (only where
            it is glibc, as on most Linux machines)
  forms     the chapter's forms, one means more in each, on the captions of
            --corpus (random lengths without it), tiny, V = 10,000: random
            batches of 128 pairs, then of 4,096 places; products by oneDNN
            and in 16 bits only where they pay, as `train` decides it
  limit     base in 32 bits: operations in products over the time, as a part
            of what the machine makes in a large product (by torch's choice or
            by oneDNN, what is faster), in training and in greedy decoding of
            64 sentences
  copy      the copy task from start to end in a process of its own, five
            seeds

`--processes` adds two processes of one thread, joined by torchrun, to `forms`:
40 updates of the command `train` in each round, in alternation with the rest.
Prints rates and ratios: the median of the rounds, the least and the largest.
Needs an otherwise idle machine, and `pip install -r tests/peers.txt -c
constraints.txt`.
"""

import argparse
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import decoding_peers  # noqa: E402
import peers  # noqa: E402
from machine import half_is_measured, machine, write_figures  # noqa: E402

import annotated_transformer as book  # noqa: E402


def spread(values):
    """Median, least and largest, rounded."""
    found = statistics.median(values), min(values), max(values)
    return [float(f"{value:.4g}") for value in found]


def in_turn(runs, rounds, anew=()):
    """{name: [tokens a second of each round]} of functions, in alternation.

    A function returns its tokens, or (tokens, seconds) if not all of the time
    it takes is to be counted. `anew`: those that begin anew each time.
    """
    rates = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            if not turn and name in anew:
                continue  # nothing of it would be warm later
            began = time.perf_counter()
            tokens, taken = run(), time.perf_counter() - began
            if isinstance(tokens, tuple):
                tokens, taken = tokens
            rate = tokens / taken
            if turn:  # the first warms up
                rates[name].append(rate)
    return rates


def show(title, rates, *bases):
    """Print one setting's rates, and return it as rows."""
    rows = []
    for name, found in rates.items():
        row = {
            "setting": title,
            "form": name,
            "tokens_per_second": spread(found),
        }
        line = (
            f"{title:8} {name:24} {row['tokens_per_second'][0]:9.1f} tokens/s"
        )
        for base in bases:
            ratios = [rate / other for rate, other in zip(found, rates[base])]
            row[f"over_{base}"] = spread(ratios)
            middle, least, most = row[f"over_{base}"]
            line += f"  {middle:5.2f} of {base} ({least:.2f} to {most:.2f})"
        print(line, flush=True)
        rows.append(row)
    return rows


# ----------------------------------------------------------------- the peer


def full_batch(places, vocab, length=16):
    """A Batch without padding: `places` target tokens."""
    B = places // length
    src = torch.randint(4, vocab, (B, length))
    return book.Batch(src, torch.randint(4, vocab, (B, length + 1)))


def our_update(config, batch, half, onednn):
    """A function that makes an update of the fast form."""
    torch.manual_seed(0)
    products = {"half": half, "onednn": onednn and not half}
    model = book.fast(book.Transformer(config), **products)
    gradient = partial(book.backward_in_slices, **products)
    places = batch.count()
    recipe = book.Recipe(batch_tokens=places, max_tokens=places)
    updates = book.training(
        model, itertools.repeat(batch), recipe, gradient=gradient
    )
    return lambda: next(updates).tokens


def peers_update(config, batch, half=False):
    """A function that makes an update of torch's own Transformer.

    `half`: with autocast to bfloat16, PyTorch's own way to 16-bit products.
    """
    torch.manual_seed(0)
    model = peers.torch_transformer(config).train()
    optimizer = book.adam(model)  # fused, as ours
    for group in optimizer.param_groups:
        group["lr"] = 1e-5

    def update():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        return batch.count()

    return update


def against_the_peer(args):
    """Rows: tiny and base against torch.nn.Transformer."""
    rows = []
    for preset, places in (("tiny", 4096), ("base", 1024)):
        sizes, vocab = dict(book.PRESETS[preset]), 10_000
        if args.quick:
            sizes |= dict(N=1, d_model=32, d_ff=64)
            vocab, places = 100, 64
        config = book.Config(vocab, vocab, **sizes)
        batch = full_batch(places, vocab)
        runs = {
            "peer": peers_update(config, batch),
            "peer in 16 bits": peers_update(config, batch, True),
            "ours, 32 bits": our_update(config, batch, False, args.onednn),
            "ours, 16-bit products": our_update(config, batch, True, False),
        }
        if not args.half:
            runs = {name: runs[name] for name in runs if "16" not in name}
        rates = in_turn(runs, args.rounds)
        rows += show(preset, rates, *(name for name in runs if "peer" in name))
    return rows


def with_memory_kept(args):
    """Rows: the same in a process that keeps the memory it was given.

    By default glibc returns large blocks to the system, whose pages then
    come anew, each with a fault. So a part of the peer's time is the
    system's; this leaves it out, for both.
    """
    if platform.libc_ver()[0] != "glibc":
        print("kept     left out, it needs glibc")
        return []
    keep = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
    quick = ["--quick"] if args.quick else []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kept.json"
        command = [sys.executable, __file__, "--only", "peer", *quick,
                   "--rounds", str(args.rounds),
                   "--json", str(file)]  # fmt: skip
        print("with the memory kept:", flush=True)
        subprocess.run(command, check=True, env={**os.environ, **keep})
        rows = json.loads(file.read_text("utf-8"))["rows"]
    return [{**row, "setting": f"{row['setting']}, kept"} for row in rows]


# ---------------------------------------------------------------- the forms


def caption_pairs(args, vocab):
    """Encoded training pairs: captions in pieces, or random ones."""
    if not args.corpus:
        return book.random_pairs(2000, vocab)
    texts = book.corpus_part(args.corpus, "train", "en", "de")
    translator = book.untrained_translator(
        texts, ("en", "de"), dict(book.PRESETS["tiny"]), pieces=vocab
    )
    return [translator.encode_texts(*pair) for pair in texts]


def the_forms(args):
    """Rows: each form of the chapter, on the captions."""
    vocab, places = (150, 500) if args.quick else (10_000, 4096)
    pairs = caption_pairs(args, vocab)
    sizes = dict(book.PRESETS["tiny"])
    if args.quick:
        sizes |= dict(N=1, d_model=32, d_ff=64)
    config = book.Config(vocab, vocab, **sizes)
    number, forms = 1 if args.quick else 4, book.forms_that_pay()
    half = "16-bit products" in forms

    def of(form):
        updates = book.training_in_form(form, config, pairs, places, forms)

        def several():
            return sum(u.tokens for u in itertools.islice(updates, number))

        return several

    runs = {form: of(form) for form in forms}
    with tempfile.TemporaryDirectory() as folder:
        if args.processes and not args.corpus:
            print("two processes: left out, they need --corpus")
        elif args.processes:
            counts = [b.count() for b in next_batches(pairs, places, 100)]
            tokens = statistics.mean(counts)
            runs["two processes"] = lambda: two_processes(
                args, folder, tokens, half
            )
        rates = in_turn(runs, args.rounds, anew={"two processes"})
    return show("forms", rates, book.FORMS[0])


def next_batches(pairs, places, number):
    """The first batches of a training."""
    return itertools.islice(book.stream(pairs, places, 0), number)


def output_of(command, **how):
    """What a command prints; ends with its error output if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, **how)
    if done.returncode:
        words = shlex.join(command)
        sys.exit(f"{words}: status {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def two_processes(args, folder, tokens, half):
    """(tokens, seconds) of updates of `train` by torchrun, two processes.

    `tokens`: how many an update has, in the mean; `half`: in 16 bits.
    """
    first, last = 20, (40 if args.quick else 60)  # the log has their times
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        "--nproc-per-node", "2", str(ROOT / "annotated_transformer.py"),
        "train", "--corpus", args.corpus, "--src", "en", "--tgt", "de",
        "--preset", "tiny", "--half" if half else "--no-half",
        "--steps", str(last), "--save-every", "100000",
        "--pieces", "150" if args.quick else "10000",
        "--batch-tokens", "500" if args.quick else "4096",
        "--cache", f"{folder}/cache", "--out", f"{folder}/run",
        *(["--layers", "1", "--d-model", "32"] if args.quick else []),
    ]  # fmt: skip
    threads = str(max(1, torch.get_num_threads() // 2))
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    shutil.rmtree(f"{folder}/run", ignore_errors=True)
    output_of(command, env=environment, timeout=1200)
    log = book.read_log(Path(folder) / "run")
    at = {e["step"]: e["seconds"] for e in log if "loss" in e}
    return (last - first) * tokens, at[last] - at[first]


# ---------------------------------------------------------------- the limit


def machines_rate(side=2048):
    """Operations a second of a product (side, side) · (side, side).

    By torch's choice of a library or by oneDNN, what is faster.
    """
    x = torch.randn(side, side)
    seconds = [
        book.best_seconds(partial(multiply, x, x), 3)
        for multiply in (torch.nn.functional.linear, book.onednn_product)
    ]
    return 2 * side**3 / min(seconds)


def the_limit(args):
    """Rows: base in 32 bits, as a part of the machine's rate."""
    from torch.utils.flop_counter import FlopCounterMode

    sizes, vocab = dict(book.PRESETS["base"]), 10_000
    if args.quick:
        sizes, vocab = sizes | dict(N=1, d_model=64, d_ff=128), 100
    config = book.Config(vocab, vocab, **sizes)
    batch = full_batch(1024, vocab)
    with FlopCounterMode(display=False) as counter:
        model = book.Transformer(config)
        book.backward(model, batch, batch.count(), 0.1)
    train_work = counter.get_total_flops()
    torch.manual_seed(0)
    model = peers.punctual_model(config, 15)
    src = torch.tensor(decoding_peers.random_rows(64, (15, 16), vocab))
    with FlopCounterMode(display=False) as counter:
        book.greedy(model, src)
    write_work = counter.get_total_flops()
    train = our_update(config, batch, False, args.onednn)
    writer = book.Writer(model)
    runs = {
        "training": (train_work, train),
        "greedy decoding": (
            write_work, lambda: book.greedy(model, src, begin=writer.begin),
        ),
    }  # fmt: skip
    shares, rates = {name: [] for name in runs}, []
    side = 256 if args.quick else 2048
    for turn in range(args.rounds + 1):
        limits, speeds = [machines_rate(side)], {}
        for name, (work, run) in runs.items():
            began = time.perf_counter()
            run()
            speeds[name] = work / (time.perf_counter() - began)
            limits.append(machines_rate(side))
        rate = max(limits)  # a slow moment must not lower it
        if turn:
            for name, speed in speeds.items():
                shares[name].append(speed / rate)
            rates.append(rate)
    rows = []
    for name, found in shares.items():
        row = {
            "setting": "limit",
            "form": f"base, {name}",
            "share": spread(found),
            "operations_per_second": spread(rates),
        }
        print(f"limit    base, {name:18} {row['share'][0]:.2f} of "
              f"{row['operations_per_second'][0] / 1e9:.0f} · 10⁹ operations/s"
              f" ({row['share'][1]:.2f} to {row['share'][2]:.2f})",
              flush=True)  # fmt: skip
        rows.append(row)
    return rows


# ------------------------------------------------------------ the copy task


def the_copy_task(args):
    """Rows: seconds of the copy task, start and end of Python included."""
    rows = []
    for seed in range(1 if args.quick else 5):
        command = [sys.executable, str(ROOT / "annotated_transformer.py"),
                   "copy", "--seed", str(seed)]  # fmt: skip
        began = time.perf_counter()
        output = output_of(command)
        taken = time.perf_counter() - began
        right = re.search(r"exact match: (.*)", output)[1]
        row = {"setting": "copy", "form": f"seed {seed}",
               "seconds": round(taken, 1), "result": right}  # fmt: skip
        print(f"copy     seed {seed}: {taken:.1f} s, {right}", flush=True)
        rows.append(row)
    return rows


PARTS = {
    "peer": against_the_peer,
    "kept": with_memory_kept,
    "forms": the_forms,
    "limit": the_limit,
    "copy": the_copy_task,
}


def main(argv=None):
    """Measure and print; --json writes the figures too."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout
    )
    option = parser.add_argument
    option("--only", choices=PARTS, action="append", help="a part, or several")
    option("--corpus", metavar="CORPUS", help="multi30k, or a folder")
    option("--processes", action="store_true", help="torchrun as well")
    option("--rounds", type=int, default=5, metavar="N")
    option("--quick", action="store_true", help="seconds, and no figures")
    option("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    args.rounds = 1 if args.quick else args.rounds
    facts, rows = machine(vars(args)), []
    args.onednn = book.onednn_pays(torch.device("cpu"))
    args.half = half_is_measured()
    facts["products in 32 bits by oneDNN"] = args.onednn
    print(json.dumps(facts))
    for name in args.only or PARTS:
        rows += PARTS[name](args)
        # what is measured is kept, whatever comes later
        write_figures(args.json, {"machine": facts, "rows": rows})
    return rows


if __name__ == "__main__":
    main()
