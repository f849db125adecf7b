"""Exercises: each answer is right; blanks and slips are refused, and why."""

import re
from pathlib import Path

import numpy
import pytest
import torch

import annotated_transformer as book

SOURCE = Path(book.__file__).read_text(encoding="utf-8")


def answers():
    """{function: code} of the answers folded away in the prose."""
    prose = "\n".join(
        line[2:] if line.startswith("# ") else ""
        for line in SOURCE.splitlines()
    )
    found = {}
    for fold in re.findall(
        r"<summary>Answer</summary>(.*?)</details>", prose, re.S
    ):
        [code] = re.findall(r"```python\n(.*?)```", fold, re.S)
        [*_, name] = re.findall(r"^(?:def|class) (\w+)", code, re.M)
        assert name not in found, name
        found[name] = code
    return found


ANSWERS = answers()
BY_BLANK = {e.blank.__name__: e for e in book.EXERCISES.values() if e.blank}


def test_every_exercise_has_a_cell_to_fill_in_and_an_answer():
    assert all(e.blank for e in book.EXERCISES.values())
    assert BY_BLANK.keys() == ANSWERS.keys()
    assert len(BY_BLANK) == len(book.EXERCISES)
    hints = SOURCE.count("# <details><summary>Hint</summary>")
    assert hints == len(ANSWERS)


@pytest.mark.parametrize("name", sorted(BY_BLANK))
def test_the_answer_is_right(name):
    names = dict(vars(book))
    exec(ANSWERS[name], names)
    assert BY_BLANK[name].verdict(names[name]) == ""


@pytest.mark.parametrize("name", sorted(BY_BLANK))
def test_the_unfilled_cell_is_refused(name):
    exercise = BY_BLANK[name]
    assert exercise.verdict(exercise.blank) == book.UNFILLED


@pytest.mark.parametrize("name", sorted(BY_BLANK))
def test_plausible_wrong_answers_are_refused_and_told_why(name):
    exercise = BY_BLANK[name]
    assert exercise.slips
    for words, slip in exercise.slips.items():
        said = exercise.verdict(slip)
        assert said and said != book.UNFILLED, words
        assert "raises" not in said, f"{words}: {said}"
        if exercise.judge == exercise.compare:
            assert said == words


def a_sum(judge=None):
    def draw():
        return (torch.randn(2, 3),)

    made = book.Exercise(lambda x: x.sum(0))
    made.judged_by(draw, judge=judge)
    return made


@pytest.mark.parametrize(
    "answer, words",
    [
        (lambda x: x.sum(1), r"shape \(2,\), and should have \(3,\)"),
        (lambda x: x.sum(0).double(), "dtype torch.float64"),
        (lambda x: x.sum(0).tolist(), "should be a tensor"),
        (
            lambda x: x.sum(0) * torch.tensor([1, 1, 2.0]),
            r"at \[2\].*\(1 of 3",
        ),
        (lambda x: x.add_(1).sum(0) - 2, "changes its input"),
        (lambda x: x @ x, "raises RuntimeError"),
        (lambda x: x.sum(0) / 0 * 0, "nan, and should be"),
        (lambda x: None, "Not filled in"),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(answer, words):
    assert re.search(words, a_sum().verdict(answer))


def test_an_error_names_the_line_of_the_answer():
    def answer(x):
        return torch.stack([x, x.sum(0)])

    said = a_sum().verdict(answer)
    line = answer.__code__.co_firstlineno + 1
    assert said.endswith(f"line {line}: return torch.stack([x, x.sum(0)])")

    class Answer(torch.nn.Module):
        def forward(self, x):
            return self.lost

    said = a_sum(judge=lambda kind: str(kind()(1))).verdict(Answer)
    assert said.endswith(": return self.lost")


def test_an_exercise_without_its_judge_says_so():
    made = book.Exercise(lambda x: x.sum(0))
    assert "folded cell" in made.verdict(lambda x: x.sum(0))


def test_a_right_answer_is_right():
    assert a_sum().verdict(lambda x: x[0] + x[1]) == ""
    assert book.difference((1, 2.0), (1, 2.0)) == ""
    assert "part 1" in book.difference((1, 2.5), (1, 2.0))
    assert book.difference(True, 1) and book.difference([1], [1, 2])


@pytest.mark.parametrize(
    "answer",
    [3, 3.0, torch.tensor(3), numpy.int64(3), numpy.float64(3)],
)
@pytest.mark.parametrize("truth", [3, 3.0])
def test_a_number_may_be_a_tensor_and_an_integer_a_float(answer, truth):
    assert book.difference(answer, truth) == ""
    assert book.difference(answer + 0.01, truth)
    assert book.difference([answer], truth)


def test_an_integer_is_exact_and_no_truth_value():
    assert book.difference(7013.0001, 7013)
    assert book.difference(torch.tensor(True), 1)
    assert book.difference(torch.tensor([3]), 3)


def test_the_slow_function_of_an_exercise_can_be_called():
    scores = torch.randn(2, 5)
    slow = book.EXERCISES["softmax_in_loops"](scores)
    torch.testing.assert_close(slow, scores.softmax(-1))


def test_the_nucleus_of_all_that_is_probable_has_an_end():
    """Probabilities add up to a little less than 1, or more."""
    for logits in torch.randn(40, 8):
        marks = book.EXERCISES["nucleus_in_loops"](logits, 1.0)
        assert logits.softmax(0)[marks].sum() > 1 - 1e-4


def test_what_is_no_tensor_or_is_changed_is_said_by_the_judges_too():
    said = BY_BLANK["read_and_labels"].verdict(lambda rows: (rows, rows))
    assert "should be a tensor" in said
    said = BY_BLANK["turn_by_place"].verdict(lambda x, places: x.neg_())
    assert said == "your code changes its input"
