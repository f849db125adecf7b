"""Notation and glossary: names, shapes, values and sections are the code's."""

import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import annotated_transformer as book

SOURCE = Path(book.__file__)
TEXT = SOURCE.read_text(encoding="utf-8")
PROSE = "\n".join(
    line[2:] if line.startswith("# ") and line[2:4] != "%%" else ""
    for line in TEXT.splitlines()
)
HEADINGS = re.findall(r"(?m)^# (#+) (.+)$", TEXT)
SIZES = {"B": 3, "S": 5, "T": 7, "D": 16, "H": 2, "K": 8, "F": 24, "V": 14}
SIZES["R"] = SIZES["B"] * SIZES["T"]


def part(title):
    """The prose below a heading of this title, to the next of any level."""
    text = PROSE.split(f"## {title}\n")[1]
    return re.split(r"(?m)^#+ ", text)[0]


def rows():
    """[symbol, meaning, shape, code, section] of the table."""
    lines = re.findall(r"(?m)^\| (.+) \|$", part("Notation"))
    found = [re.split(r"(?<!\\) \| ", line) for line in lines]
    return found[1:]


def terms():
    """{term: (what it means, section)} of the glossary."""
    items = re.split(r"(?m)^\* ", part("Glossary"))[1:]
    form = re.compile(r"\*\*(.+?)\*\*: (.+) \(\*(.+)\*\)\.")
    found = [form.fullmatch(" ".join(i.split())) for i in items]
    assert all(found)
    return {m[1]: (m[2], m[3]) for m in found}


ROWS, TERMS = rows(), terms()


class Recorder:
    """What the variables of the book's functions hold when they return."""

    def __init__(self):
        self.seen = {}

    def __call__(self, frame, event, argument):
        if event == "return" and frame.f_code.co_filename == str(SOURCE):
            held = dict(frame.f_locals)
            owner = type(held.get("self")).__name__
            name = frame.f_code.co_name
            for key in (name, f"{owner}.{name}"):
                self.seen[key] = held | {"return": argument}


def sizes():
    """A small model, and a batch whose sizes all differ."""
    model = book.Transformer(
        book.Config(14, 14, N=2, d_model=16, d_ff=24, h=2, dropout=0.1)
    )
    src = torch.randint(4, 14, (3, 5))
    tgt = torch.randint(4, 14, (3, 8))
    return model, book.Batch(src, tgt)


def recorded(function, *arguments, **options):
    """{function: its variables} of the last call of each in a run."""
    recorder = Recorder()
    sys.setprofile(recorder)
    try:
        function(*arguments, **options)
    finally:
        sys.setprofile(None)
    return recorder.seen


@pytest.fixture(scope="module")
def run():
    """{function: its variables}, and {class: an object of it}."""
    model, batch = sizes()
    src, read, labels = batch.src, batch.read, batch.labels
    seen = recorded(book.beam_search, model.eval(), src, width=3, extra=2)
    seen |= recorded(model.train(), src, read)
    logits = model(src, read).flatten(0, 1)
    ones = torch.ones(16)
    seen |= recorded(book.smoothed_loss, logits, labels.flatten())
    seen |= recorded(book.layer_norm, torch.randn(3, 7, 16), ones, ones)
    seen |= recorded(book.positional_encoding, 7, 16)
    seen |= recorded(book.target_mask, read)
    seen |= recorded(book.padding_mask, src)
    seen |= recorded(book.adam, model)
    seen |= recorded(book.learning_rate, 1)
    seen |= recorded(book.length_penalty, 5)
    both = SimpleNamespace(model=model, src="de", tgt="de")
    seen |= recorded(book.read_back, both, both, [], [])
    seen |= recorded(book.vote, None, [])
    objects = {"Config": model.config, "Batch": batch}
    return seen, objects | {type(m).__name__: m for m in model.modules()}


def resolve(code, run):
    """What a name in the code column stands for."""
    seen, objects = run
    function, _, variable = code.strip("`)").partition("(")
    if variable:
        return seen[function][variable]
    if function in seen:
        return seen[function]["return"]
    owner, *path = function.split(".")
    found = objects[owner]
    for name in path:
        found = getattr(found, name)
    return found.weight.T if isinstance(found, nn.Linear) else found


def shape_of(thing):
    return tuple(thing.shape) if isinstance(thing, torch.Tensor) else ()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[3]}")
def test_the_name_exists_and_has_the_shape(row, run):
    _, _, shape, code, _ = row
    thing = resolve(code, run)
    if shape == "2 numbers":
        assert len(thing) == 2
        return
    words = re.findall(r"[\w/+]+", shape)
    wanted = tuple(eval(word, {}, SIZES) for word in words)
    assert shape_of(thing) == tuple(map(int, wanted))
    if not words:
        assert isinstance(thing, (int, float, torch.optim.Adam))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[3]}")
def test_a_function_in_the_table_is_the_book_s_own(row):
    name = row[3].strip("`").split("(")[0].split(".")[0]
    thing = getattr(book, name)
    assert inspect.isfunction(thing) or inspect.isclass(thing)


@pytest.mark.parametrize(
    "code, value",
    [
        ("layer_norm(eps)", 1e-5),
        ("adam(betas)", (0.9, 0.98)),
        ("smoothed_loss(smoothing)", 0.1),
        ("learning_rate(warmup)", 4000),
        ("length_penalty(alpha)", 0.6),
        ("Config.N", 2),
        ("Config.h", SIZES["H"]),
        ("Config.d_k", SIZES["K"]),
        ("Config.d_ff", SIZES["F"]),
        ("Config.d_model", SIZES["D"]),
        ("Config.tgt_vocab", SIZES["V"]),
        ("Config.dropout", 0.1),
    ],
)
def test_the_name_has_the_paper_s_value(code, value, run):
    assert code in {row[3].strip("`") for row in ROWS}
    assert resolve(code, run) == value


def test_adam_has_the_paper_s_epsilon(run):
    assert resolve("adam", run).defaults["eps"] == 1e-9


def test_the_table_has_the_paper_s_symbols():
    symbols = {s.strip("$") for row in ROWS for s in row[0].split(", ")}
    wanted = "N d_model d_ff h d_k d_v P_drop ε_ls W^Q W^K W^V W^O W_1 W_2 "
    wanted += "Q K V PE pos 2i β₁ β₂ ε warmup_steps step_num lrate α"
    assert set(wanted.split()) <= symbols
    assert set(SIZES) <= symbols | {"B", "S", "T", "R"}


def test_sections_of_the_table_are_headings():
    numbers = {
        n
        for _, title in HEADINGS
        for n in re.findall(r"\d+(?:\.\d+)*", title.split(" (")[0])
    }
    found = [row[4].removeprefix("Section ") for row in ROWS]
    assert set(found) <= numbers | {f"*{title}*" for _, title in HEADINGS}
    assert len(ROWS) > 40


@pytest.mark.parametrize("term", TERMS)
def test_a_term_stands_in_its_section(term):
    _, title = TERMS[term]
    assert [t for _, t in HEADINGS].count(title) == 1
    section = TEXT.split(f"# {title}\n")[1]
    section = re.split(r"(?m)^# #+ ", section)[0]
    section = " ".join(re.sub(r"(?m)^# ?", "", section).split())
    assert term.lower() in section.lower().replace("_", " ")


def test_the_glossary_is_in_the_order_of_the_alphabet():
    assert list(TERMS) == sorted(TERMS, key=str.lower)
    assert len(TERMS) > 35
    assert all(meaning[0] != " " and len(meaning) < 90
               for meaning, _ in TERMS.values())  # fmt: skip
