"""The book runs from its first cell to its last, as its reader would run it.

This takes longest of all, so it begins first, beside the other tests, and has
one thread, as they have (see conftest.py): more would wait for each other.
"""

import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from test_project import ROOT, outputs_of

import annotated_transformer as book
from tools import notebook

pytestmark = pytest.mark.slow
EXECUTED = ROOT / "build" / "smoke.ipynb"


@pytest.fixture(scope="module")
def new_run():
    """The notebook, executed in a folder of its own, with its outputs."""
    EXECUTED.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, ROOT / "tools/notebook.py", "execute", EXECUTED],
        cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True, encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"{done.stdout[-2000:]}\n{done.stderr}", pytrace=False)
    return nbformat.read(EXECUTED, as_version=4)


def test_a_new_run_gives_outputs_of_the_same_kinds(new_run):
    kinds = [
        [
            [
                [output.output_type, *sorted(output.get("data", {}))]
                for output in cell.get("outputs", [])
            ]
            for cell in nb.cells
        ]
        for nb in (notebook.read_notebook(), new_run)
    ]
    assert kinds[0] == kinds[1]


def test_a_new_run_is_of_the_very_source(new_run):
    """And so is the stored notebook, cell by cell."""
    sources = [
        [cell.source for cell in nb.cells]
        for nb in (notebook.read_source(), notebook.read_notebook(), new_run)
    ]
    assert sources[0] == sources[1] == sources[2]


def test_a_new_run_learns_the_generated_corpus(new_run):
    """By its own recipe; and writes sentences that it has never seen."""
    shown = "\n".join(t for cell in new_run.cells for t in outputs_of(cell))
    [bleu, right] = re.search(
        r"^BLEU ([\d.]+)\n(\d+) of 1000 exactly right$", shown, re.M
    ).groups()
    assert float(bleu) >= 95 and int(right) >= 900
    heads = {
        name: float(percent)
        for name, percent in re.findall(r"best head, (\w+) +([\d.]+)%", shown)
    }
    assert heads["trained"] > 75
    assert heads["trained"] > 3 * heads["untrained"]


def test_the_explored_sentences_are_translated_without_a_slip(new_run):
    """So the alignment of the reference is that of the words shown."""
    [chart] = [
        output.data[kind]
        for cell in new_run.cells
        if "def exploring_attention(" in cell.source
        for output in cell.outputs
        for kind in output.data
        if kind.startswith(notebook.CHART)
    ]
    [sentences] = [
        p["bind"]["labels"]
        for p in chart["params"]
        if p["name"] == "the_sentence"
    ]
    test = {pair.de: pair for pair in book.toy_corpus()["test"]}
    assert len(sentences) == 3
    tables = list(chart["datasets"].values())
    [words] = [rows for rows in tables if "word" in rows[0]]
    for i, text in enumerate(sentences):
        shown = {
            row["query"]: row["word"].split()[-1]
            for row in words
            if row["sentence"] == i and row["side"] == "query"
            and book.KINDS[row["kind"]] == "cross-attention"
        }  # fmt: skip
        written = [shown[place] for place in sorted(shown)]
        assert written == [*test[text].en.split(), "</s>"]
    aligned = sum(len(test[text].alignment) for text in sentences)
    assert aligned in map(len, tables)


def test_each_example_shows_something(new_run):
    shown = {}
    for cell in new_run.cells:
        for name in re.findall(r"(?m)^@example\ndef (\w+)", cell.source):
            shown[name] = cell.outputs
    assert shown.keys() == book.EXAMPLES.keys()
    for name, outputs in shown.items():
        texts = [o.get("text") or o.get("data") for o in outputs]
        assert texts and all(texts), name


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


def test_each_chart_says_what_it_shows(new_run):
    """In words, in its title and at its axes; and it is no large one."""
    charts = [
        output.data[kind]
        for cell in new_run.cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
        if kind.startswith(notebook.CHART)
    ]
    assert len(charts) > 15
    for spec in charts:
        assert len(json.dumps(spec)) < 300_000
        assert all(spec.pop("datasets").values())
        assert len(spec["description"]) > 40
        assert spec["title"]
        for axis in ("x", "y"):
            channels = [c for c in every(axis, spec) if "field" in c]
            assert channels
            for channel in channels:  # without an axis, it has no title
                assert channel.get("title") or channel["axis"] is None
