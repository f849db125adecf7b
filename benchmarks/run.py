"""All benchmarks, one after the other, and a table: python benchmarks/run.py

Each runs in a process of its own and writes results/benchmarks-*.json with
machine, versions and commit. Then the table: what was reached, beside what
was aimed at. `make bench` installs what is needed and calls this; `--quick`
shows in a minute or two that everything runs, and its figures mean nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("training", "decoding_peers", "export", "data")
MODEL = ROOT / "results" / "model-en-de"  # post-norm, as its peers are


def options_of(part, args):
    """The command-line options of a part."""
    quick = ["--quick"] if args.quick else []
    rounds = ["--rounds", str(args.rounds)]
    corpus = ["--corpus", args.corpus] if args.corpus else []
    if part == "training":
        return [*quick, *rounds, *corpus, "--processes"]
    if part == "decoding_peers":
        model = ["--model", str(args.model)] if corpus else []
        return [*quick, *rounds, *corpus, *model]
    if part == "export":
        return [*corpus, *(["--limit", "20"] if args.quick else [])]
    pairs = ["2000"] if args.quick else ["45000", "450000", args.pairs]
    return ["--pairs", *pairs, *(["--pieces", "500"] if args.quick else [])]


def aims(results):
    """Lines of the table: (what, reached, aim or None), of {part: facts}."""
    training = results["training"]["rows"]
    decoding = results["decoding_peers"]["rows"]

    def of(rows, key, **wanted):
        for row in rows:
            if all(row.get(name) == value for name, value in wanted.items()):
                return row[key]
        return None

    for preset, aim in (("tiny", 2.0), ("base", 1.6)):
        for form in ("ours, 32 bits", "ours, 16-bit products"):
            value = of(training, "over_peer", setting=preset, form=form)
            yield (
                f"training, {preset}, {form}, over nn.Transformer",
                value,
                aim,
            )
    last = [row for row in training if row["setting"] == "forms"]
    for row in last[-2:]:
        [key] = [name for name in row if name.startswith("over_")]
        more = row["form"] if "processes" in row["form"] else "all means"
        yield f"tiny on captions, from plain to {more}", row[key], 4.0
    for row in training:
        if row["setting"] == "limit":
            yield f"{row['form']}, of the product rate", row["share"], 0.85
    for setting, program, aim in (
        ("test set", "Marian", 3.0),
        ("test set", "CTranslate2", None),
        ("base", "Marian", 1.4),
        ("base", "CTranslate2", 0.95),
    ):
        for width in (1, 5):
            value = of(decoding, "ours_over_it", setting=setting,
                       program=program, width=width)  # fmt: skip
            how = f"beam {width}" if width > 1 else "greedy"
            yield f"{setting}, {how}, ours over {program}", value, aim
    for width in (1, 5):
        rate, half = (
            of(decoding, "tokens_per_second", setting="base", width=width,
               program=program) for program in ("Marian", "ours, bf16")
        )  # fmt: skip
        how = f"beam {width}" if width > 1 else "greedy"
        value = [half / rate] if rate and half else None
        yield f"base, {how}, ours in 16 bits over Marian", value, 2.2


def table(results):
    """Print what was reached."""
    print(f"\n{'':54} {'reached':>8} {'spread':>15} {'aim':>6}")
    for what, found, aim in aims(results):
        if found is None:
            print(f"{what:54} {'not run':>8}")
            continue
        middle, *ends = found
        spread = f"{min(ends):.2f} to {max(ends):.2f}" if ends else ""
        aim = "" if aim is None else f"{aim:.2f}"
        print(f"{what:54} {middle:8.2f} {spread:>15} {aim:>6}")
    copies = [r for r in results["training"]["rows"] if r["setting"] == "copy"]
    seconds = ", ".join(f"{row['seconds']}" for row in copies)
    print(f"{'copy task, seconds':54} {seconds}   (aim: 10)")


def main(argv=None):
    """Run all parts and print the table."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout
    )
    option = parser.add_argument
    option("--corpus", metavar="CORPUS", help="multi30k, or a folder")
    option(
        "--model", metavar="DIR", default=MODEL,
        help="a trained post-norm model of it (results/model-en-de)",
    )  # fmt: skip
    option(
        "--pairs", default="4500000", metavar="N", help="the largest corpus"
    )
    option("--only", choices=PARTS, action="append", help="a part, or several")
    option("--rounds", type=int, default=5, metavar="N")
    option("--quick", action="store_true", help="minutes, and no figures")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) if args.quick else ROOT / "results"
        for part in args.only or PARTS:
            if part == "export" and not args.corpus:
                print("export: left out, it needs --corpus")
                continue
            script = ROOT / "benchmarks" / f"{part}.py"
            file = home / f"benchmarks-{part.replace('_', '-')}.json"
            print(f"\n{script.name}", flush=True)
            options = [*options_of(part, args), "--json", str(file)]
            command = [sys.executable, str(script), *options]
            subprocess.run(command, check=True)
        results = {}
        for part in ("training", "decoding_peers"):
            file = home / f"benchmarks-{part.replace('_', '-')}.json"
            text = file.read_text("utf-8") if file.exists() else '{"rows": []}'
            results[part] = json.loads(text)
    table(results)
    return results


if __name__ == "__main__":
    main()
