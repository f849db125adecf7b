"""The drawings in images/: true to their code, the book and their reader."""

import io
import re
import sys
import tokenize
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import annotated_transformer as book
from tools import drawings

ROOT = Path(__file__).resolve().parent.parent
SVG = "{http://www.w3.org/2000/svg}"
NAMES = list(drawings.PICTURES)
each = pytest.mark.parametrize("name", NAMES)


def read(name):
    path = drawings.IMAGES / f"{name}.svg"
    return path.read_bytes().decode("utf-8")


def elements(name):
    """Return all elements of a picture, the outermost first."""
    return list(ET.fromstring(read(name)).iter())


def classes(name):
    return {e.get("class") for e in elements(name)} - {None}


def luminance(colour):
    """The relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in parts
    ]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear))


def contrast(one, other):
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_the_files_are_what_the_code_makes(monkeypatch):
    assert drawings.differences() == []
    monkeypatch.setattr(sys, "argv", ["drawings.py", "--check"])
    drawings.main()


def test_a_stale_or_missing_file_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(drawings, "IMAGES", tmp_path)
    monkeypatch.setattr(sys, "argv", ["drawings.py"])
    drawings.main()
    assert drawings.differences() == []
    path = tmp_path / "heads.svg"
    path.write_text(path.read_text("utf-8").replace(">17<", ">18<"), "utf-8")
    (tmp_path / "residual.svg").unlink()
    assert drawings.differences() == ["residual", "heads"]
    monkeypatch.setattr(sys, "argv", ["drawings.py", "--check"])
    with pytest.raises(SystemExit, match="residual, heads"):
        drawings.main()


@each
def test_each_is_told_in_words(name):
    """A role, a title, and a description that begins with the short one."""
    root, *rest = elements(name)
    assert root.tag == f"{SVG}svg" and root.get("role") == "img"
    title, told = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    ids = [title.get("id"), told.get("id")]
    assert root.get("aria-labelledby").split() == ids
    short = drawings.ALTERNATIVES[name]
    assert 10 < len(title.text) < 70
    assert 100 < len(short) < 300 and short[-1] == "."
    assert told.text.startswith(short) and len(told.text) > 600


@each
def test_each_is_small_enough_for_a_page(name):
    root, text = elements(name)[0], read(name)
    width, height = int(root.get("width")), int(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width} {height}"
    assert width <= 760
    assert len(text.encode("utf-8")) < 40_000
    assert "\r" not in text and text.endswith("</svg>\n")


@each
def test_no_letter_is_smaller_than_12_pixels(name):
    words = [e for e in elements(name) if e.tag == f"{SVG}text"]
    assert words and all(e.get("font-size") for e in words)
    sizes = [e.get("font-size") for e in elements(name)]
    assert min(float(size) for size in sizes if size) >= 12


def test_words_that_do_not_fit_are_refused():
    d = drawings.Drawing(300, 100, drawings.heads)
    d.box(150, 20, 90, 30, "d-token", "it fits")
    with pytest.raises(ValueError, match="too wide"):
        d.box(150, 20, 90, 30, "d-token", "does not fit")
    with pytest.raises(ValueError, match="leaves the card"):
        d.text(250, 50, "leaves the card")


@each
def test_colours_are_classes_alone(name):
    """No colour but in the style, which a page may drop."""
    outside = re.sub(r"<style>.*?</style>", "", read(name), flags=re.S)
    assert not re.search(r"#[0-9a-fA-F]{3,8}\b|rgb|hsl|url\(", outside)
    for element in elements(name):
        assert not {"fill", "stroke", "color", "style"} & set(element.attrib)
    drawn = {"rect", "circle", "path", "text"}
    for element in elements(name):
        if element.tag.removeprefix(SVG) in drawn:
            assert element.get("class") in drawings.COLOURS


@each
def test_the_style_is_the_light_one_of_the_classes_used(name):
    style = ET.fromstring(read(name)).find(f"{SVG}style").text.strip()
    used = [c for c in drawings.COLOURS if c in classes(name)]
    assert style == drawings.css(used)
    for rule in style.split("\n"):
        assert re.fullmatch(r"\.d-[a-z]+\{[^{}]+\}", rule)


def test_the_classes_are_those_with_colours():
    """Each class used has colours, and each that has them is used."""
    assert set().union(*map(classes, NAMES)) == set(drawings.COLOURS)
    dark = drawings.css(dark=True)
    assert ".d-ink{fill:#e9ecef}" in dark and "#1f2328" not in dark


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_words_stand_out_from_every_ground(theme):
    """Contrast at least 4.5 for words and 3 for lines (WCAG 2)."""
    grounds = [v["fill"][theme] for v in drawings.SHAPES.values()]
    assert len(set(grounds)) >= 9
    for words in drawings.TEXTS.values():
        for ground in grounds:
            assert contrast(words["fill"][theme], ground) >= 4.5, ground
    for name, line in drawings.LINES.items():
        for ground in ("d-paper", "d-group"):
            behind = drawings.SHAPES[ground]["fill"][theme]
            assert contrast(line["stroke"][theme], behind) >= 3, name


@each
def test_words_have_the_classes_of_words(name):
    for element in elements(name):
        if element.tag == f"{SVG}text":
            assert element.get("class") in drawings.TEXTS


def test_no_id_is_used_twice():
    """All pictures may stand in one page."""
    ids = []
    for name in NAMES:
        own = [e.get("id") for e in elements(name) if e.get("id")]
        assert own and all(i.startswith(f"{name}-") for i in own)
        ids += own
    assert len(ids) == len(set(ids))


def book_names():
    """Return the names in the book's code, its prose left out."""
    text = (ROOT / "annotated_transformer.py").read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.string for t in tokens if t.type == tokenize.NAME}


def code_in(name):
    """Return what a picture writes in the letters of code."""
    spans = [e for e in elements(name) if e.tag == f"{SVG}tspan"]
    return [e.text for e in spans if "mono" in e.get("font-family", "")]


def test_names_in_the_pictures_are_names_in_the_book():
    code = "\n".join(text for name in NAMES for text in code_in(name))
    example = "zwei Hunde spielen two dogs play"
    names = set(re.findall(r"\b[A-Za-z_]\w+", code)) - set(example.split())
    assert {"EncoderLayer", "DecoderLayer", "Residual", "Stack"} <= names
    assert {"W_Q", "W_K", "W_V", "W_O", "d_model", "norm_first"} <= names
    assert names - book_names() == set()


def numbers(group, mark=""):
    """Return a group's numbers in the order in which one reads them."""
    words = [
        e
        for part in elements("heads")
        if part.get("id") == f"heads-{group}"
        for e in part.iter(f"{SVG}text")
        if re.fullmatch(rf"\d+{mark}", e.text)
    ]
    assert words
    for one, next_one in zip(words, words[1:]):
        (a, b), (c, d) = (
            [float(e.get(axis)) for axis in "yx"] for e in (one, next_one)
        )
        below_or_right = (a, b) < (c, d)
        assert below_or_right or group == "wrong"  # its heads: side by side
    return [int(e.text.rstrip(mark or None)) for e in words]


def test_heads_are_split_as_torch_splits_them():
    x = torch.arange(18).view(1, 3, 6)  # (B, T, D)
    pieces = x.unflatten(-1, (2, 3))  # (B, T, H, K)
    split = pieces.transpose(1, 2)  # (B, H, T, K)
    merged = split.transpose(1, 2).flatten(-2)  # (B, T, D)
    assert numbers("split-rows") == x.flatten().tolist()
    assert numbers("split-pieces") == pieces.flatten().tolist()
    assert numbers("split-heads") == split.flatten().tolist()
    assert numbers("merge-heads", "′") == split.flatten().tolist()
    assert numbers("merge-pieces", "′") == pieces.flatten().tolist()
    assert numbers("merge-rows", "′") == merged.flatten().tolist()
    attention = book.MultiHeadAttention(book.Config(d_model=6, h=2))
    assert attention.split(x).equal(split)


def test_the_mistake_is_the_one_that_view_makes():
    x = torch.arange(18).view(1, 3, 6)  # (B, T, D)
    wrong = x.view(1, 2, 3, 3)
    assert numbers("wrong") == wrong.flatten().tolist()
    assert set(wrong[0, 0].flatten().tolist()) == set(range(9))


def test_the_decoder_reads_what_the_book_gives_it():
    """Words read, labels and hidden places are those of the code."""
    tgt = torch.arange(5)[None]  # the places of the words
    batch = book.Batch(tgt, tgt)
    reads, labels = (
        [drawings.WORDS[i] for i in row[0]]
        for row in (batch.read, batch.labels)
    )
    shown = code_in("training_and_inference")
    chips = [word for word in shown if word in drawings.WORDS]
    assert chips[:8] == reads + labels  # training
    assert chips[8:16] == reads + labels  # inference: read, then written
    hidden = [
        e
        for e in elements("training_and_inference")
        if e.get("class") == "d-future"
    ]
    key = 1  # one more explains the mark
    assert len(hidden) - key == (~book.causal_mask(4)).sum()
