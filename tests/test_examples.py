"""What the book shows: the same each time, and wherever it is read.

That each example runs is shown by test_notebook.py.
"""

import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import torch
from test_checks import SOURCE, load

import annotated_transformer as book


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


CHECKED = """
import annotated_transformer as book

def one_is_two():
    "One is two."
    assert 1 == 2

book.NOTEBOOK = True
book.check(one_is_two)
"""


def test_where_python_leaves_out_asserts_nothing_is_said_to_hold():
    path = str(Path(book.__file__).parent)
    run = partial(
        subprocess.run, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    done = run([sys.executable, "-O", "-c", CHECKED])
    assert done.stdout == "Not examined, by python -O: One is two.\n"
    done = run([sys.executable, "-c", CHECKED])
    assert "AssertionError" in done.stderr
    assert done.stdout == "Does not hold: One is two.\n"


def test_forget_forgets_what_functions_have_kept():
    own, made = load(SOURCE, "own"), []
    own.toy_corpus = None  # the one that other tests use
    own.numbers = cache(lambda: made.append(1))
    for _ in range(2):
        own.numbers()
        own.numbers()
        own.forget()
    assert len(made) == 2


def test_a_claim_says_if_it_came_out_otherwise_before(capsys, monkeypatch):
    monkeypatch.setattr(book, "NOTEBOOK", True)
    monkeypatch.setattr(book, "FINDINGS", {})
    monkeypatch.setattr(book, "CLAIMS", {})
    for holds, before in ((True, False), (True, False), (False, True)):
        book.claim("3.1", "one is one")(
            lambda holds=holds: (holds, "it was tried")
        )
        shown = capsys.readouterr().out
        assert ("(Before: verified.)" in shown) == before


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


def test_post_norm_loses_the_gradient_in_cross_attention_alone():
    """The other sub-layers hand back what their norms take."""
    for seed in range(3):
        torch.manual_seed(seed)
        model = book.tiny_model(N=6, d_model=64, d_ff=128)
        notes = book.note_norms(model.encoder), book.note_norms(model.decoder)
        book.backward_of_digits(model)
        encoder, decoder = map(book.passed_on, notes, (2, 3))
        for spread, norm, _ in (*encoder, *decoder):
            torch.testing.assert_close(norm, 1 / spread, rtol=0.05, atol=0)
        (_, _, own), (_, taken, cross), (_, _, network) = decoder
        torch.testing.assert_close(cross, taken, rtol=0.05, atol=0)
        assert cross < 0.8 < min(own, network, *encoder[:, 2])
