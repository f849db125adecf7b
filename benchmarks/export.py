"""Does an exported model translate as ours does? python benchmarks/export.py

Exports a model for CTranslate2, in 32 bits and in 8, translates a part of a
corpus with both programs, and counts the sentences that come out otherwise:
greedily, and with a beam of four without a length penalty, for the two
programs' penalties are of different forms. Of each that differs, our own
model says in double precision which text is likelier, and by how much. Our
products in 8 bits are compared with those in 32 as well. Needs `pip install
ctranslate2`.
"""

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from machine import machine, write_figures  # noqa: E402

import annotated_transformer as book  # noqa: E402

NEAR = 0.01  # two texts whose log-probabilities differ by less are a tie


def theirs(folder, tokens, beam, penalty=0):
    """The target tokens that CTranslate2 writes for lists of tokens."""
    import ctranslate2

    threads = torch.get_num_threads()
    model = ctranslate2.Translator(str(folder), intra_threads=threads)
    found = model.translate_batch(
        tokens, beam_size=beam, length_penalty=penalty, max_batch_size=1024,
        batch_type="tokens", min_decoding_length=0,
        max_decoding_length=256,
    )  # fmt: skip
    return [result.hypotheses[0] for result in found]


def ours(translator, tokens, beam, alpha=0):
    """The target tokens that the book writes for the same."""
    return translator.translate_words(tokens, beam, alpha)


def margins(translator, tokens, one, other):
    """log P(one) - log P(other) in double precision, where they differ."""
    source, target = translator.src_vocab, translator.tgt_vocab
    model = translator.model.double()
    rows = []
    for words, a, b in zip(tokens, one, other):
        if a != b:
            src = torch.tensor([source.encode(words)])
            score = partial(book.log_probability, model, src)
            pair = (score(target.encode(text)[:-1]) for text in (a, b))
            first, second = pair
            rows.append(first - second)
    model.float()
    return rows


def row(name, translator, pairs, tokens, one, other):
    """What is printed of one comparison."""
    gaps = margins(translator, tokens, one, other)
    texts = [translator.tgt_vocab.join(output) for output in other]
    score = book.bleu(texts, [reference for _, reference in pairs]).score
    facts = {
        "name": name,
        "sentences": len(pairs),
        "differ": len(gaps),
        "ties": sum(abs(gap) < NEAR for gap in gaps),
        "ours_likelier": sum(gap >= NEAR for gap in gaps),
        "theirs_likelier": sum(gap <= -NEAR for gap in gaps),
        "bleu": round(score, 2),
    }
    print(
        f"{name:32} {facts['differ']:4} differ: {facts['ties']:3} ties, "
        f"first likelier {facts['ours_likelier']:3}, second likelier "
        f"{facts['theirs_likelier']:3}; BLEU {score:.2f}",
        flush=True,
    )
    return facts


def compare(model, corpus, part, limit=None):
    """The rows for a model's folder and a part of a corpus."""
    translator = book.load_translator(model)
    languages = translator.src, translator.tgt
    pairs = book.corpus_part(corpus, part, *languages)[:limit]
    tokens = [translator.split(source) for source, _ in pairs]
    again = book.load_translator(model)  # to be used in 8 bits
    book.use_int8(again.model)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for kind in ("none", "int8"):
            folder = Path(place) / kind
            book.export_ctranslate2(translator, folder, kind)
        for beam in (1, 4):
            how = f"beam {beam}" if beam > 1 else "greedy"
            plain = ours(translator, tokens, beam)
            small = ours(again, tokens, beam)
            exported = {
                kind: theirs(Path(place) / kind, tokens, beam)
                for kind in ("none", "int8")
            }
            for name, one, other in (
                ("ours, 32 bits, with itself", plain, plain),
                ("ours, with CTranslate2", plain, exported["none"]),
                ("ours, with our 8 bits", plain, small),
                ("ours, with CTranslate2 in 8", plain, exported["int8"]),
            ):
                title = f"{how}: {name}"
                row_ = row(title, translator, pairs, tokens, one, other)
                rows.append(row_)
        facts = row(
            "beam 4, each its penalty", translator, pairs, tokens,
            ours(translator, tokens, 4, 1.5),
            theirs(Path(place) / "none", tokens, 4, 1),
        )  # fmt: skip
    return [*rows, facts]


def main():
    """Measure and print; --json writes the figures too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=ROOT / "results" / "model-de-en")
    parser.add_argument("--corpus", default="multi30k")
    parser.add_argument("--split", default="test_2016_flickr")
    parser.add_argument("--limit", type=int, help="the first N sentences")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    facts = machine(vars(args) | {"model": str(args.model)})
    try:
        rows = compare(Path(args.model), args.corpus, args.split, args.limit)
    except book.InputError as error:
        parser.error(str(error))
    write_figures(args.json, {"machine": facts, "rows": rows})


if __name__ == "__main__":
    main()
