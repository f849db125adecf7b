"""How fast does a GPU train? benchmarks/gpu.py

Base, with the paper's 37,000 words and updates of 25,000 places (pairs of 32
tokens a side, no padding), products in bfloat16: ours, and the same
architecture from torch.nn.Transformer with `cross_entropy`, `nn.Dropout`,
autocast and a fused Adam. Each runs as it is, through torch.compile, and
compiled and recorded as a CUDA graph, in alternation, several rounds of some
updates after a warm-up. The *share* is the operations in products over the
time, as a part of what the GPU makes in one large product, measured in each
round.

Prints and, with --json, writes tokens a second, shares and ratios: the median
of the rounds, the least and the largest. Needs a CUDA device.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers  # noqa: E402
from machine import machine, write_figures  # noqa: E402
from training import spread  # noqa: E402

import annotated_transformer as book  # noqa: E402

HALF = torch.bfloat16


def timed(work, device):
    """Seconds until the device has done the work."""
    wait = torch.cuda.synchronize if device == "cuda" else int
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def several(work, times):
    """Do it several times."""
    for _ in range(times):
        work()


def product_rate(device, side, times=10):
    """Operations a second of products (side, side) · (side, side)."""
    one, two = torch.randn(2, side, side, device=device).to(HALF)
    multiply = book.partial(several, lambda: one @ two, times)
    multiply()
    return times * 2 * side**3 / timed(multiply, device)


def operations(config, length):
    """Operations in products, for an update of one pair of `length`."""
    from torch.utils.flop_counter import FlopCounterMode

    model = book.Transformer(config)
    pair = full_batch(config.src_vocab, 1, length, "cpu")
    with FlopCounterMode(display=False) as counter:
        book.backward(model, pair, length, 0.1)
    return counter.get_total_flops()


def full_batch(vocab, pairs, length, device):
    """A Batch without padding."""
    src = torch.randint(4, vocab, (pairs, length))
    tgt = torch.randint(4, vocab, (pairs, length + 1))
    return book.Batch(src, tgt).to(device)


def optimizer_of(model):
    """The book's Adam, with a rate, and fit to be recorded."""
    optimizer = book.adam(model)  # fused
    for group in optimizer.param_groups:
        on_gpu = group["params"][0].is_cuda
        group["lr"], group["capturable"] = 1e-5, on_gpu
    return optimizer


def our_update(config, batch, compiled):
    """A function that makes an update of the book's fast form."""
    torch.manual_seed(0)
    model = book.Transformer(config).to(batch.src.device).train()
    model, tokens = book.fast(model, half=True), batch.count()
    gradient = book.partial(book.backward_in_slices, half=True)
    if compiled:
        gradient = book.compiled_gradient(model, half=True, dynamic=False)
    optimizer = optimizer_of(model)

    def update():
        optimizer.zero_grad()
        gradient(model, batch, tokens, 0.1)
        optimizer.step()

    return update


def peers_update(config, batch, compiled):
    """A function that makes an update of torch's own Transformer."""
    torch.manual_seed(0)
    device = batch.src.device
    model = peers.torch_transformer(config).to(device).train()
    optimizer = optimizer_of(model)
    loss_of = torch.compile(model.loss) if compiled else model.loss

    def update():
        optimizer.zero_grad()
        with torch.autocast(device.type, HALF, cache_enabled=not compiled):
            loss = loss_of(batch)
        loss.backward()
        optimizer.step()

    return update


def measure(args, device):
    """Rows of figures."""
    sizes, vocab, length, pairs = dict(book.PRESETS["base"]), 37_000, 32, 781
    side, number = 8192, 10
    if args.quick:
        sizes |= dict(N=1, d_model=32, d_ff=64, h=2)
        vocab, length, pairs, side, number = 100, 8, 4, 64, 1
    config = book.Config(vocab, vocab, **sizes)
    batch = full_batch(vocab, pairs, length, device)
    work, tokens = operations(config, length) * pairs, batch.count()
    runs = {}
    for name, make in (("peer", peers_update), ("ours", our_update)):
        for compiled in (False, True):
            how = ", compiled" if compiled else ""
            run = runs[name + how] = make(config, batch, compiled)
            several(run, 3)  # compiles, and warms up
        here = batch.src.device
        runs[f"{name}, recorded"], _ = book.as_graph(run, here)  # the compiled
    seconds, rates = {name: [] for name in runs}, []
    for _ in range(args.rounds):
        rates.append(product_rate(device, side))
        for name, run in runs.items():
            updates = book.partial(several, run, number)
            seconds[name].append(timed(updates, device) / number)
    rows = []
    for name, taken in seconds.items():
        other = name.replace("ours", "peer")
        shares = [work / t / rate for t, rate in zip(taken, rates)]
        ratios = [theirs / t for theirs, t in zip(seconds[other], taken)]
        row = {
            "setting": "gpu, base",
            "form": name,
            "tokens_per_second": spread([tokens / t for t in taken]),
            "milliseconds": round(1e3 * statistics.median(taken), 2),
            "share": spread(shares),
            "over_peer_likewise": spread(ratios),
            "operations_per_second": spread(rates),
        }
        print(f"gpu, base  {name:16} {row['milliseconds']:8.2f} ms  "
              f"{row['tokens_per_second'][0]:10,.0f} tokens/s  "
              f"share {row['share'][0]:.3f} of "
              f"{row['operations_per_second'][0] / 1e12:.0f} · 10¹²  "
              f"{row['over_peer_likewise'][0]:5.2f} of the peer likewise",
              flush=True)  # fmt: skip
        rows.append(row)
    return rows


def main(argv=None):
    """Measure and print; --json writes the figures too."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout
    )
    option = parser.add_argument
    option("--rounds", type=int, default=5, metavar="N")
    text = "seconds, and no figures; without a GPU on the processor"
    option("--quick", action="store_true", help=text)
    option("--json", metavar="FILE", help="write the figures there")
    text = "the book's version, where no .git tells it"
    option("--commit", metavar="NAME", help=text)
    args = parser.parse_args(argv)
    args.rounds = 1 if args.quick else args.rounds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not args.quick:
        parser.error("no CUDA device here; --quick shows that it runs")
    facts = machine(vars(args))
    facts["commit"] = facts["options"].pop("commit") or facts["commit"]
    if device == "cuda":
        facts["gpu"] = torch.cuda.get_device_name()
    print(json.dumps(facts))
    rows = measure(args, device)
    write_figures(args.json, {"machine": facts, "rows": rows})
    return rows


if __name__ == "__main__":
    main()
