"""All benchmarks, one after the other, and a table: python benchmarks/run.py

Each runs in a process of its own and writes benchmarks-*.json with machine,
versions, commit and options: into results/ with --corpus multi30k, where the
README's table comes from (`make tables`); else into build/, for on made-up
text the figures are others. `--name` adds a name to these files, so that those
of another machine stay beside them. Then the table: what was reached, beside
what was aimed at. `make bench` installs what is needed and calls this;
`--quick` shows in a minute or two that everything runs, and its figures mean
nothing.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import annotated_transformer as book  # noqa: E402

PARTS = (
    "training",
    "decoding_peers",
    "decoding_cache",
    "export",
    "data",
    "gpu",
)
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
    if part == "decoding_cache":
        return quick
    if part == "gpu":
        return [*quick, *rounds]
    if part == "export":
        return [*corpus, *(["--limit", "20"] if args.quick else [])]
    pairs = ["2000"] if args.quick else ["45000", "450000", str(args.pairs)]
    return ["--pairs", *pairs, *(["--pieces", "500"] if args.quick else [])]


def file_of(part, name=None):
    """The name of the file of a part's figures, on a machine of that name."""
    return "-".join(["benchmarks", *part.split("_"), *[name] * bool(name)]) + (
        ".json"
    )


def aims(results):
    """Lines of the table: (what, reached, aim or None), of {part: facts}."""
    training = results["training"]["rows"]
    decoding = results["decoding_peers"]["rows"]
    gpu = results.get("gpu", {"rows": []})["rows"]

    def of(rows, key, **wanted):
        for row in rows:
            if all(row.get(name) == value for name, value in wanted.items()):
                return row.get(key)
        return None

    for preset, aim in (("tiny", 2.0), ("base", 1.6)):
        for form in ("ours, 32 bits", "ours, 16-bit products"):
            value = of(training, "over_peer", setting=preset, form=form)
            what = f"training, {preset}, {form}, over nn.Transformer"
            yield what + " in 32 bits", value, aim
        key = "over_peer in 16 bits"
        yield f"training, {preset}, both in 16 bits, over nn.Transformer", of(
            training, key, setting=preset, form="ours, 16-bit products"
        ), aim  # fmt: skip
    for preset in ("tiny", "base"):
        value = of(training, "over_peer", setting=f"{preset}, kept",
                   form="ours, 32 bits")  # fmt: skip
        what = f"training, {preset}, both in 32 bits, memory kept by both"
        yield what, value, None
    forms = [row for row in training if row["setting"] == "forms"]
    several = [row for row in forms if "processes" in row["form"]]
    alone = [row for row in forms if row not in several]
    for row in [*alone[-1:], *several]:
        [key] = [name for name in row if name.startswith("over_")]
        more = row["form"] if row in several else "all means"
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
    for bits, program in ((16, "ours, bf16"), (8, "ours, int8")):
        for width in (1, 5):
            times, fewer = (
                of(decoding, "seconds", setting="base", width=width,
                   program=name) for name in ("Marian", program)
            )  # fmt: skip
            how = f"beam {width}" if width > 1 else "greedy"
            value = None
            if times and fewer:  # round by round: both write as many tokens
                found = [time / own for time, own in zip(times, fewer)]
                value = [statistics.median(found), min(found), max(found)]
            what = f"base, {how}, ours in {bits} bits over Marian in 32"
            yield what, value, 2.2
    for row in gpu:
        if "ours" in row["form"]:
            how = row["form"].replace("ours", "GPU, base")
            plain = row["form"] == "ours"
            yield f"{how}, of the product rate", row["share"], (
                None if plain else 0.35
            )  # fmt: skip
            yield f"{how}, over nn.Transformer likewise", row[
                "over_peer_likewise"
            ], None if plain else 1.3  # fmt: skip


def table(results):
    """Print what was reached."""
    print(f"\n{'':58} {'reached':>8} {'spread':>15} {'aim':>6}")
    for what, found, aim in aims(results):
        if found is None:
            print(f"{what:58} {'not run':>8}")
            continue
        middle, least, most = found
        spread = f"{least:.2f} to {most:.2f}"
        aim = "" if aim is None else f"{aim:.2f}"
        print(f"{what:58} {middle:8.2f} {spread:>15} {aim:>6}")
    copies = [r for r in results["training"]["rows"] if r["setting"] == "copy"]
    seconds = ", ".join(f"{row['seconds']}" for row in copies)
    print(f"{'copy task, seconds':58} {seconds}   (aim: 10)")


def main(argv=None):
    """Run all parts and print the table."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=layout
    )
    option = parser.add_argument
    option("--corpus", metavar="CORPUS", help="multi30k, or its folder")
    option(
        "--model", metavar="DIR",
        help="a trained post-norm model of it (results/model-en-de)",
    )  # fmt: skip
    text = "the largest corpus (4500000)"
    option("--pairs", type=int, default=4_500_000, metavar="N", help=text)
    option("--only", choices=PARTS, action="append", help="a part, or several")
    text = "of this machine, in the names of the files, as xeon"
    option("--name", metavar="NAME", help=text)
    option("--rounds", type=int, default=5, metavar="N")
    option("--quick", action="store_true", help="minutes, and no figures")
    args = parser.parse_args(argv)
    if args.name and not re.fullmatch(r"[a-z0-9-]+", args.name):
        parser.error("--name: small letters, digits and - only")
    if args.model and not args.corpus:
        parser.error("--model needs --corpus, whose test set it translates")
    args.model = Path(args.model or MODEL)
    if args.corpus:  # what is wrong with it shows before an hour is spent
        try:
            languages = book.load_translator(args.model)
            for part in ("train", "test_2016_flickr"):
                book.corpus_part(
                    args.corpus, part, languages.src, languages.tgt
                )
        except book.InputError as error:
            parser.error(str(error))
    home = ROOT / ("results" if args.corpus else "build")
    home.mkdir(exist_ok=True)
    results = dict.fromkeys(("training", "decoding_peers"), {"rows": []})
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) if args.quick else home
        for part in args.only or PARTS:
            if part == "export" and not args.corpus:
                print("export: left out, it needs --corpus")
                continue
            if part == "gpu" and not torch.cuda.is_available():
                print("gpu: left out, there is no CUDA device")
                continue
            script = ROOT / "benchmarks" / f"{part}.py"
            file = home / file_of(part, args.name)
            print(f"\n{script.name}", flush=True)
            options = [*options_of(part, args), "--json", str(file)]
            command = [sys.executable, str(script), *options]
            if subprocess.run(command).returncode:  # the others are measured
                failed.append(part)
            else:
                results[part] = json.loads(file.read_text("utf-8"))
    table(results)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
    return results


if __name__ == "__main__":
    main()
