"""How fast do others write with our weights? benchmarks/decoding_peers.py

Two settings, each greedily and with a beam of five, in alternation, several
rounds after a warm-up, each program at the best of several batch sizes:

  test set  a part of a corpus with a trained tiny post-norm model (--model;
            without one, random sources and a random model)
  base      base sizes, V = 10,000, random weights, 64 sentences of 15 tokens
            to 16 tokens

The programs are the book's own `greedy` and `beam_search`, transformers'
Marian and CTranslate2, all with the same weights; ours also with factors of
8 and 16 bits (not 16 where a product in them takes more than four times as
long), CTranslate2 in 8 bits and in 16 where it can. CTranslate2 has processes
of its own: once it has worked, PyTorch in the same process takes about one and
a half times as long, and nobody would use both in one. Prints
tokens a second, how many texts are not ours, and ours over each program's
speed: the median of the rounds' ratios, the least and the largest. Needs an
otherwise idle machine, and `pip install -r tests/peers.txt -c
constraints.txt`.
"""

import argparse
import copy
import json
import multiprocessing
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import peers  # noqa: E402
from machine import half_is_measured, machine, write_figures  # noqa: E402

import annotated_transformer as book  # noqa: E402
from annotated_transformer import EOS  # noqa: E402

# --------------------------------------------------------------- the programs
# Each takes rows of source ids and a batch size, and gives as many texts.


def in_batches(write, rows, size):
    """Call write(src) on batches of rows of like length, in their order."""
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    texts = [None for _ in rows]
    for start in range(0, len(order), size):
        group = order[start : start + size]
        src = book.pad([rows[i] for i in group])
        for i, text in zip(group, write(src)):
            texts[i] = text
    return texts


def ours(model, width, kind=None):
    """The book's own search; `kind`: dtype of its Writer's products."""
    begin = book.Writer(model, kind).begin

    def write(src):
        if width == 1:
            return book.greedy(model, src, begin=begin)
        found = book.beam_search(model, src, width, alpha=0, begin=begin)
        return [hypotheses[0].tokens for hypotheses in found]

    return partial(in_batches, write)


def theirs(write, twin, width):
    """`peers.marian_writes` or `peers.ct2_writes`."""
    return partial(in_batches, lambda src: write(twin, src, width))


def serve(pipe, width, *model):
    """In a process of CTranslate2: answer (rows, batch size) with texts."""
    twin = peers.ct2(*model)
    program = theirs(peers.ct2_writes, twin, width)
    pipe.send("ready")
    while True:
        try:
            pipe.send(program(*pipe.recv()))
        except EOFError:  # nobody asks any more
            return


def apart(model, width, kind="none"):
    """CTranslate2 in a process that ends with this one."""
    start = multiprocessing.get_context("spawn")
    pipe, end = start.Pipe()
    facts = width, model, None, kind, torch.get_num_threads()
    start.Process(target=serve, args=(end, *facts), daemon=True).start()
    end.close()
    pipe.recv()

    def program(rows, size):
        pipe.send((rows, size))
        return pipe.recv()

    return program


def programs(model, width, half=True):
    """{name: program} for a model, those first that are in 32 bits."""
    made = {"ours": ours(model, width)}
    if not model.config.norm_first:
        twin = peers.marian(model)
        made["Marian"] = theirs(peers.marian_writes, twin, width)
    made["CTranslate2"] = apart(model, width)
    other = copy.deepcopy(model)
    book.use_int8(other)
    made["ours, int8"] = ours(other, width)
    if half:
        made["ours, bf16"] = ours(model, width, torch.bfloat16)
    for name, kind in (("int8", "int8"), ("bf16", "bfloat16")):
        import ctranslate2

        if kind in ctranslate2.get_supported_compute_types("cpu"):
            made[f"CTranslate2, {name}"] = apart(model, width, kind)
    return made


# ------------------------------------------------------------------- measuring


def timed(program, rows, size):
    """(seconds, texts) of one pass."""
    time.sleep(0.3)  # until the threads of the one before sleep
    began = time.perf_counter()
    texts = program(rows, size)
    return time.perf_counter() - began, texts


def measure(title, model, rows, sizes, width, rounds, half=True):
    """Rows of figures for all programs, measured in alternation."""
    made, best, first = programs(model, width, half), {}, {}
    for name, program in made.items():
        program(rows[: sizes[0]], sizes[0])  # warm
        tries = {}
        for size in sizes:
            tries[size] = timed(program, rows, size)
            if tries[size][0] > 1.5 * min(tries.values())[0]:
                break  # still larger batches only take longer
        best[name] = min(tries, key=lambda size: tries[size][0])
        first[name] = tries[best[name]][1]
    seconds = {name: [] for name in made}
    for _ in range(rounds):
        for name, program in made.items():
            seconds[name].append(timed(program, rows, best[name])[0])
    return [
        figures(title, width, name, best[name], seconds, first)
        for name in made
    ]


def figures(title, width, name, size, seconds, texts):
    """One row: printed, and returned as a dict."""
    tokens = sum(len(text) + 1 for text in texts[name])  # with EOS
    rates = [tokens / taken for taken in seconds[name]]
    own = sum(len(text) + 1 for text in texts["ours"])
    ratios = [own / mine / rate for mine, rate in zip(seconds["ours"], rates)]
    pairs = zip(texts["ours"], texts[name])
    row = {
        "setting": title,
        "width": width,
        "program": name,
        "batch": size,
        "sentences": len(texts[name]),
        "tokens": tokens,
        "seconds": [round(taken, 4) for taken in seconds[name]],
        "tokens_per_second": round(statistics.median(rates), 1),
        "differ_from_ours": sum(one != other for one, other in pairs),
        "ours_over_it": [
            round(value, 3)
            for value in (statistics.median(ratios), min(ratios), max(ratios))
        ],
    }
    how = f"beam {width}" if width > 1 else "greedy"
    middle, least, most = row["ours_over_it"]
    print(
        f"{title:9} {how}  {name:18} batch {size:4} "
        f"{row['tokens_per_second']:9.1f} tokens/s  "
        f"differ {row['differ_from_ours']:4} of {row['sentences']}  "
        f"ours over it {middle:6.2f} ({least:.2f} to {most:.2f})",
        flush=True,
    )
    return row


# -------------------------------------------------------------------- settings


def random_rows(number, lengths, vocab):
    """Rows of random source ids that end with EOS, of the given lengths."""
    sizes = torch.randint(*lengths, (number,)).tolist()
    return [
        [*torch.randint(4, vocab, (size - 1,)).tolist(), EOS] for size in sizes
    ]


def test_set(args):
    """(model, rows) of the first setting."""
    torch.manual_seed(0)
    if args.model:
        translator = book.load_translator(Path(args.model))
        languages = translator.src, translator.tgt
        pairs = book.corpus_part(args.corpus, args.split, *languages)
        split, encode = translator.split, translator.src_vocab.encode
        rows = [encode(split(source)) for source, _ in pairs]
        return translator.model, rows[:24] if args.quick else rows
    vocab = 200 if args.quick else 5000
    config = book.Config(vocab, vocab, **book.PRESETS["tiny"])
    rows = random_rows(12 if args.quick else 1000, (6, 26), vocab)
    return peers.punctual_model(config, 13), rows


def base(args):
    """(model, rows) of the second setting."""
    torch.manual_seed(0)
    sizes = dict(book.PRESETS["base"])
    if args.quick:
        sizes |= dict(N=2, d_model=64, d_ff=128)
    vocab = 200 if args.quick else 10_000
    model = peers.punctual_model(book.Config(vocab, vocab, **sizes), 15)
    return model, random_rows(8 if args.quick else 64, (15, 16), vocab)


def main(argv=None):
    """Measure and print; --json writes the figures too."""
    text, layout = __doc__, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=text, formatter_class=layout)
    option = parser.add_argument
    option("--model", metavar="DIR", help="a trained post-norm model")
    option("--corpus", help="multi30k, or a folder (with --model)")
    option("--split", default="test_2016_flickr", metavar="NAME")
    option("--only", choices=("test set", "base"), help="one setting")
    option("--rounds", type=int, default=5, metavar="N")
    option("--quick", action="store_true", help="seconds, and no figures")
    option("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    if bool(args.model) != bool(args.corpus):
        parser.error("--model and --corpus go together")
    rounds = 1 if args.quick else args.rounds
    facts, rows = machine(vars(args)), []
    print(json.dumps(facts))
    half = half_is_measured()
    for title, make, sizes in (
        ("test set", test_set, (64, 128, 256, 512, 1000)),
        ("base", base, (32, 64)),
    ):
        if args.only not in (None, title):
            continue
        model, sources = make(args)
        for width in (1, 5):
            choice = sizes[:1] if args.quick else sizes
            rows += measure(title, model, sources, choice, width, rounds, half)
            write_figures(args.json, {"machine": facts, "rows": rows})
    return rows


if __name__ == "__main__":
    main()
