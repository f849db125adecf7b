"""What learners ask: an index at the start, an answer where it says."""

import re
from pathlib import Path

import pytest

import annotated_transformer as book
from tools import notebook

SOURCE = Path(book.__file__).read_text(encoding="utf-8")
CELLS = re.split(r"(?m)^# %%", SOURCE)
MARK = "**Asked often:**"


def prose(cell):
    """A cell's Markdown without its comment signs; "" for code."""
    head, _, body = cell.partition("\n")
    if "[markdown]" not in head:
        return ""
    return re.sub(r"(?m)^# ?", "", body)


def lower(question):
    """A question as it stands in mid-sentence, on one line."""
    words = " ".join(question.split())
    return words[0].lower() + words[1:]


def index():
    """{question: title} of the list at the start."""
    [cell] = [c for c in CELLS if "<summary>Questions that readers" in c]
    items = re.split(r"(?m)^\* ", prose(cell).partition("</details>")[0])
    found = {}
    for item in items[1:]:
        words = " ".join(item.split())
        [(question, title)] = re.findall(r"^(.*?\?) \*(.+)\*$", words)
        found[lower(question)] = title
    return found


def answers():
    """{question: (titles of the sections it stands in, answer)}"""
    found, titles = {}, {}
    for cell in CELLS:
        for part in re.split(r"\n\s*\n", prose(cell)):
            if heading := re.match(r"(#+) (.+)", part):
                level = len(heading[1])
                titles = {k: v for k, v in titles.items() if k < level}
                titles[level] = heading[2]
            if part.startswith(MARK):
                words = " ".join(part.removeprefix(MARK).split())
                question, mark, answer = words.partition("?")
                assert question + mark not in found, question
                found[question + mark] = set(titles.values()), answer
    return found


INDEX, ANSWERS = index(), answers()


def test_every_question_of_the_index_is_answered_and_no_other():
    assert INDEX.keys() == ANSWERS.keys()
    assert len(INDEX) >= 17


def test_no_question_is_marked_in_another_manner():
    marks = re.findall(r"(?i)asked often", SOURCE)
    assert len(marks) == len(ANSWERS)


@pytest.mark.parametrize("question", INDEX)
def test_the_answer_stands_where_the_index_says(question):
    titles, answer = ANSWERS[question]
    assert INDEX[question] in titles
    assert len(answer.split()) > 10


def test_experiments_on_questions_are_folded():
    """So they do not lengthen the path of who reads for the first time."""
    tagged = [c for c in CELLS if c.startswith(' tags=["question"]')]
    assert "question" in notebook.FOLDED and len(tagged) >= 8
    for cell in tagged:
        assert re.search(r"(?m)^@(example|check)\ndef ", cell)
