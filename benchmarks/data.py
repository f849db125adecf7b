"""What does a corpus cost before training? python benchmarks/data.py

Writes corpora of made-up words, encodes each in a process of its own (count
the lines, learn the pieces, encode, plan an epoch, make its first batches),
and starts a second time in another one. Prints seconds and the process's
peak memory. `--pairs 4500000` is the size of the paper's corpus; it needs
about 3 GB of disk in the folder for temporary files.
"""

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORDS, HALVES, BATCHES, PLACES = 100_000, 50_000, 10, 25_000


def halves(draw, letters):
    """Half sentences of words that are as unequal as those of a language."""
    syllables = [a + b + c for a in letters for b in "aeiou" for c in letters]
    words = set()
    while len(words) < WORDS:
        words.add("".join(draw.choices(syllables, k=draw.randint(1, 4))))
    words = sorted(words)
    draw.shuffle(words)
    weights = [1 / (rank + 2.7) for rank in range(WORDS)]
    totals = list(itertools.accumulate(weights))
    for _ in range(HALVES):
        length = min(40, max(1, round(draw.lognormvariate(2.1, 0.5))))
        yield " ".join(draw.choices(words, cum_weights=totals, k=length))


def synthesize(folder, pairs):
    """Write train.xx and train.yy, and a small validation set."""
    draw = random.Random(0)
    sides = {
        "xx": list(halves(draw, "bdfgk")),
        "yy": list(halves(draw, "lmnrst")),
    }
    for part, number in (("val", 100), ("train", pairs)):
        files = [(folder / f"{part}.{side}").open("w") for side in sides]
        for _ in range(number):
            i, j = (draw.randrange(HALVES) for _ in range(2))
            for file, side in zip(files, sides.values()):
                file.write(f"{side[i]} {side[j]}\n")
        for file in files:
            file.close()


class Clock:
    """Seconds of one stage after the other, into a dict."""

    def __init__(self):
        self.seconds, self.began = {}, time.perf_counter()

    def lap(self, name):
        now = time.perf_counter()
        self.seconds[name], self.began = now - self.began, now


def peak_megabytes():
    """The most memory that this process had."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss begins with that of the parent there
        kilobytes = status.read_text().partition("VmHWM:")[2].split()[0]
        return int(kilobytes) * 1024 / 1e6
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def measure(folder, pieces):
    """Encode the corpus, or find it encoded; print the figures as JSON."""
    sys.path.insert(0, str(ROOT))
    import annotated_transformer as book

    clock, path, busy = Clock(), folder / "pairs.pt", time.process_time()
    texts, _ = book.training_pairs(folder, "xx", "yy")
    corpus = book.EncodedCorpus(texts, path, pieces=pieces)
    clock.lap("digests")
    number = len(texts)
    clock.lap("count")
    vocabs = corpus.vocabularies(
        lambda texts: book.learn_vocabularies(texts, ("xx", "yy"), pieces)
    )
    clock.lap("learn")
    pairs = corpus.pairs(book.Translator(None, vocabs, ("xx", "yy")))
    clock.lap("encode")
    batches = book.stream(pairs, PLACES)
    first = [next(batches) for _ in range(BATCHES)]
    clock.lap("batches")
    facts = {
        "pairs": number,
        "tokens": len(pairs.tokens),
        "real_tokens_of_first_batches": sum(b.count() for b in first),
        "seconds": clock.seconds,
        "total_seconds": sum(clock.seconds.values()),
        "processor_seconds": time.process_time() - busy,
        "megabytes_on_disk": path.stat().st_size / 1e6,
        "peak_megabytes": peak_megabytes(),
    }  # fmt: skip
    print(json.dumps(facts))


def fresh(folder, pieces):
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--pieces", str(pieces)]
    done = subprocess.run(
        [*command, "--measure", folder], stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def show(first, second):
    """Print the figures of the two starts of one corpus."""
    n, total = first["pairs"], first["total_seconds"]
    stages = ", ".join(f"{k} {v:.1f}" for k, v in first["seconds"].items())
    print(
        f"{n:9,} pairs, {first['tokens'] / n:.1f} tokens each: {total:.1f} s "
        f"({stages}), {n / total:,.0f} pairs/s, of a processor "
        f"{first['processor_seconds']:.1f} s\n"
        f"{'':10}peak memory {first['peak_megabytes']:,.0f} MB, on disk "
        f"{first['megabytes_on_disk']:,.1f} MB; second start "
        f"{second['total_seconds']:.1f} s, {second['peak_megabytes']:,.0f} MB",
        flush=True,
    )


def main():
    """Measure and print; --json writes the figures too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, nargs="+", metavar="N",
                        default=[45_000, 450_000])  # fmt: skip
    parser.add_argument("--pieces", type=int, default=37_000)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure, args.pieces)
    from machine import machine, write_figures

    rows = []
    facts = machine({"pairs": args.pairs, "pieces": args.pieces})
    facts = {"machine": facts, "pieces": args.pieces, "rows": rows}
    for pairs in args.pairs:
        with tempfile.TemporaryDirectory() as name:
            synthesize(Path(name), pairs)
            first, second = (fresh(name, args.pieces) for _ in range(2))
        show(first, second)
        if second["seconds"]["encode"] >= first["seconds"]["encode"]:
            print("note: the second start encoded no faster than the first")
        rows.append({"first": first, "second": second})
        write_figures(args.json, facts)


if __name__ == "__main__":
    main()
