"""The shape comments in the source say what the tensors really are."""

import ast
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch

import annotated_transformer as book

SOURCE = Path(book.__file__)
COMMENT = re.compile(r"#.*?\(([^()]*)\)")
GLOBAL = {"D": 16, "H": 2, "K": 8, "F": 24, "V": 14}  # the same everywhere
SHRINKING = {"rows", "A"}  # not the same size throughout a call


def dimensions(text):
    """The words of "B, T, D", or None if it is no list of dimensions."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    legal = re.compile(r"\.\.\.|\d?[A-Z](/\d)?( \+ 1)?|\d+|rows")
    return words if words and all(map(legal.fullmatch, words)) else None


def commented_lines():
    """{line: (variable or None for a return, dimensions)} of the source."""
    text = SOURCE.read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Assign | ast.Return):
            continue
        comment = COMMENT.search(lines[node.end_lineno - 1])
        wanted = comment and dimensions(comment[1])
        if wanted is None:
            continue
        if isinstance(node, ast.Return):
            found[node.lineno] = (None, wanted)
        elif isinstance(node.targets[0], ast.Name):
            found[node.lineno] = (node.targets[0].id, wanted)
    return found


class ShapeTracer:
    """Compares each commented variable with its comment as the code runs.

    Sizes that are the same everywhere are `fixed`. All others must be one in
    each call, or, `by_turn`, in each turn of its loop.
    """

    def __init__(self, fixed=GLOBAL, by_turn=False):
        self.fixed, self.by_turn = fixed, by_turn
        self.comments = commented_lines()
        self.seen, self.wrong = set(), []
        self.source, self.known = str(SOURCE), {}

    def has_comment(self, code):
        """Whether to look at a function: line by line takes its time."""
        if id(code) not in self.known:
            lines = {line for _, _, line in code.co_lines()}
            self.known[id(code)] = code, not lines.isdisjoint(self.comments)
        return self.known[id(code)][1]

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if code.co_filename != self.source or not self.has_comment(code):
            return None
        letters, pending, passed = {}, [], set()

        def local(frame, event, argument):
            while pending and event in ("line", "return"):
                line = pending.pop()
                name, wanted = self.comments[line]
                if self.by_turn and line in passed:
                    letters.clear()
                    passed.clear()
                passed.add(line)
                value = argument if name is None else frame.f_locals.get(name)
                self.compare(line, value, wanted, letters)
            if event == "line" and frame.f_lineno in self.comments:
                pending.append(frame.f_lineno)
            return local

        return local

    def compare(self, line, value, wanted, letters):
        if isinstance(value, tuple):
            value = value[0]
        if not isinstance(value, torch.Tensor):
            return
        shape = list(value.shape)
        if wanted[0] == "...":
            wanted = wanted[1:]
            shape = shape[len(shape) - len(wanted) :]
        self.seen.add(line)
        fits = len(shape) == len(wanted)
        for word, size in zip(wanted, shape):
            if word in SHRINKING:
                continue
            letter, _, rest = word.partition(" + ")
            letter, _, part = letter.partition("/")
            size = (size - int(rest or 0)) * int(part or 1)
            if letter[1:] and not letter.isdigit():  # such as 2R
                fits &= size % int(letter[0]) == 0
                size, letter = size // int(letter[0]), letter[1]
            known = self.fixed | letters
            letters.setdefault(letter, size)
            if letter.isdigit():
                fits &= size == int(letter)
            else:
                fits &= known.get(letter, size) == size
        if not fits:
            self.wrong.append(f"line {line}: {wanted} is {shape}")


def run_everything():
    """One pass through the model, its loss and its decoding."""
    sizes = dict(N=2, d_model=16, d_ff=24, h=2, dropout=0.1)
    model = book.Transformer(book.Config(14, 14, **sizes))
    rows = [[4, 5, 6, 7], [5, 6], [7, 8, 9]]
    pairs = [([*r, book.EOS], [book.BOS, *r, 4, book.EOS]) for r in rows]
    batch = next(book.stream(pairs, 100))
    book.backward_in_slices(model, batch, batch.count(), 0.1)
    model(batch.src, batch.read)
    book.backward_r_drop(model, batch, batch.count(), 0.1)
    for greedy in (book.greedy, book.greedy_plain):
        greedy(model, batch.src, extra=2)
    book.beam_search(model, batch.src, width=3, extra=2)
    book.layer_norm(torch.randn(3, 16), 1.0, 0.0)
    book.positional_encoding(9, 16)


TRAIN = {"compared", "copy_model", "toy_translator", "parser_model",
         "trees_of_both", "roles_of", "best_head", "exact_share",
         "losses_on_two_lines"}  # fmt: skip
TRAINED = {  # these train a model first; the notebook runs them all
    name
    for name, function in book.EXAMPLES.items()
    if TRAIN & {*re.findall(r"\w+(?=\()", inspect.getsource(function))}
    or name == "gallery_of_bugs"  # thirty of them
} | {"one_technique_after_another", "ways_of_writing"}  # these take their time


def run_checks():
    """And the examples with such comments, but those of trained models."""
    left_out = {
        "attention_maps_sum_to_one", "a_changed_file_is_noticed",
        "bleu_equals_sacrebleu",
    }  # fmt: skip
    for name in sorted(book.CHECKS.keys() - left_out):
        book.run_seeded(book.CHECKS[name])
    comments = commented_lines()
    for name in sorted(book.EXAMPLES.keys() - TRAINED):
        lines, start = inspect.getsourcelines(book.EXAMPLES[name])
        own = range(start, start + len(lines))
        if any(line in own for line in comments):
            book.run_seeded(book.EXAMPLES[name])


def traced(tracer, run):
    for name in ("altair", "sacrebleu"):  # not traced: that takes seconds
        importlib.import_module(name)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(before)
    return tracer


@pytest.fixture(scope="module")
def tracers():
    return [
        traced(ShapeTracer(), run_everything),
        traced(ShapeTracer({}, by_turn=True), run_checks),
    ]


def test_shapes_are_as_commented(tracers):
    assert [tracer.wrong for tracer in tracers] == [[], []]


def test_most_shape_comments_are_compared(tracers):
    """Of the others most are in charts and need a trained model."""
    one, other = tracers
    assert len(one.seen | other.seen) >= 0.8 * len(one.comments)


def test_a_wrong_comment_is_noticed():
    tracer = ShapeTracer()
    line = next(iter(tracer.comments))
    tracer.compare(line, torch.zeros(3, 16), ["B", "F"], {})
    tracer.compare(line, torch.zeros(3, 16), ["B", "T", "D"], {})
    tracer.compare(line, torch.zeros(3, 4), ["B", "B"], {})
    assert len(tracer.wrong) == 3
