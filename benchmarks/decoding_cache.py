"""How much sooner do kept keys and values write?

python benchmarks/decoding_cache.py, or make bench ARGS="--only decoding_cache"

Two decoders write the same words for 32 sources, all of one length, for
several lengths: `greedy_plain`, which runs the whole decoder for each word,
and `greedy`, which keeps keys and values. Prints the seconds of each (best
of three, taken in turn) and their ratio. Needs an otherwise idle machine.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from machine import machine, write_figures  # noqa: E402

import annotated_transformer as book  # noqa: E402


def endless(preset, vocab):
    """A model of random weights that never writes the end symbol."""
    torch.manual_seed(0)
    sizes = book.PRESETS[preset]
    model = book.Transformer(book.Config(vocab, vocab, **sizes)).eval()
    logits = model.tgt_embedding.logits

    def without_end(states):
        scores = logits(states)
        scores[..., book.EOS] = -torch.inf
        return scores

    model.tgt_embedding.logits = without_end
    return model


def seconds(decode, model, src, length):
    """The time to write `length` words for each source."""
    began = time.perf_counter()
    outputs = decode(model, src, extra=length - src.size(1))
    taken = time.perf_counter() - began
    assert all(len(output) == length for output in outputs)
    return taken, outputs


def main(argv=None):
    """Measure and print; --json writes the figures too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny", choices=book.PRESETS)
    parser.add_argument("--vocab", type=int, default=5000)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="no figures")
    args = parser.parse_args(argv)
    facts = machine(vars(args))
    model = endless(args.preset, args.vocab)
    src = torch.randint(4, args.vocab, (32, 12))
    rows = []
    for length in (3, 6) if args.quick else (12, 25, 50, 100):
        times = {book.greedy_plain: [], book.greedy: []}
        for _ in range(3):
            results = []
            for decode in times:
                taken, outputs = seconds(decode, model, src, length)
                times[decode].append(taken)
                results.append(outputs)
            assert results[0] == results[1]
        plain, kept = (min(taken) for taken in times.values())
        rows.append({"words": length, "plain": plain, "kept": kept})
        print(
            f"{length:4} words  anew {plain:7.3f} s  kept {kept:7.3f} s  "
            f"ratio {plain / kept:5.1f}"
        )
    write_figures(args.json, {"machine": facts, "rows": rows})
    return rows


if __name__ == "__main__":
    main()
