"""What the book shows: examples run anywhere, charts say what they are."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import annotated_transformer as book

TRAIN = {"compared", "copy_model", "toy_translator", "parser_model",
         "trees_of_both", "roles_of", "best_head", "exact_share",
         "losses_on_two_lines"}  # fmt: skip
TRAINED = {  # these train a model first; the notebook runs them all
    name
    for name, function in book.EXAMPLES.items()
    if TRAIN & {*re.findall(r"\w+(?=\()", inspect.getsource(function))}
    or name == "gallery_of_bugs"  # thirty of them
} | {"one_technique_after_another", "ways_of_writing"}  # these take their time


def every(key, tree):
    """All values under `key`, at any depth of a chart's description."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key:
                yield value
            yield from every(key, value)
    elif isinstance(tree, list):
        for value in tree:
            yield from every(key, value)


@pytest.mark.parametrize("name", sorted(set(book.EXAMPLES) - TRAINED))
def test_an_example_shows_something(name, capsys, monkeypatch):
    """What is measured of the machine is done once; the notebook has it."""
    once = lambda work, *_: (work(), 1e-3)[1]  # noqa: E731
    monkeypatch.setattr(book, "best_seconds", once)
    if name == "memory_of_an_update":
        sizes = dict(N=1, d_model=16, d_ff=16, h=2, dropout=0.1)
        monkeypatch.setitem(book.PRESETS, "tiny", sizes)
    chart = book.run_seeded(book.EXAMPLES[name])
    printed = capsys.readouterr().out
    assert printed.strip() or chart is not None
    if not hasattr(chart, "to_dict"):  # printed text or a table
        return
    spec = chart.to_dict()
    assert len(json.dumps(spec)) < 300_000
    assert all(spec.pop("datasets").values())
    assert len(spec["description"]) > 40
    assert spec["title"]
    for axis in ("x", "y"):
        channels = [c for c in every(axis, spec) if "field" in c]
        assert channels
        for channel in channels:  # without an axis, it has no title
            assert channel.get("title") or channel["axis"] is None


def test_an_example_shows_the_same_each_time():
    example = book.EXAMPLES["gradients_of_both_orders"]
    first, second = (
        book.run_seeded(example).to_dict()["datasets"] for _ in range(2)
    )
    assert list(first.values()) == list(second.values())


def test_in_colab_a_chart_is_html_since_it_knows_no_vega(monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", object())
    alt = book.altair()
    chart = book.run_seeded(book.EXAMPLES["positional_waves"])
    [(kind, text)] = alt.renderers.get()(chart.to_dict()).items()
    assert kind == "text/html" and "vega-embed" in text
    assert json.dumps(chart.to_dict()["title"]) in text


def test_a_chart_is_shown_live_and_as_a_picture():
    alt = book.altair()
    chart = book.run_seeded(book.EXAMPLES["positional_waves"])
    bundle = alt.renderers.get()(chart.to_dict())
    assert bundle["image/png"].startswith(b"\x89PNG")
    live = bundle["application/vnd.vegalite.v5+json"]
    assert "v5" in live["$schema"]
    assert bundle["text/plain"] == live["description"]


def test_a_script_does_not_run_its_examples():
    assert not book.NOTEBOOK
    ask = (
        "import annotated_transformer as book\n"
        "made = book.toy_corpus, book.toy_translator, book.copy_model\n"
        "print(sum(function.cache_info().misses for function in made))"
    )
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=Path(book.__file__).parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "0\n"
    assert len(book.EXAMPLES) > 20
    assert len(book.CHECKS) > 15
