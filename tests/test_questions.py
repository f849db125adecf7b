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


def printed(name, capsys):
    """The lines that an experiment prints."""
    book.run_seeded(book.EXAMPLES[name])
    return capsys.readouterr().out.splitlines()


def last_numbers(lines):
    return [float(re.findall(r"[\d.]+", line)[-1]) for line in lines]


def test_masking_rows_does_nothing_and_masking_columns_all(capsys):
    lines = printed("rows_or_columns", capsys)
    nothing, rows, columns, both = last_numbers(lines)
    assert nothing == rows > 0.01
    assert columns == both == 0


def test_copied_layers_start_alike_and_part(capsys):
    lines = printed("layers_made_by_copying", capsys)
    said = [line.rpartition(" ")[2] for line in lines]
    assert said == ["False", "True", "False"]


def test_only_a_word_times_the_root_stands_beside_its_position(capsys):
    lines = printed("share_of_the_word", capsys)
    times, stored, divided = (float(x[15:].split("%")[0]) for x in lines)
    assert times > 50 and 0.1 < stored < 1 and divided < 0.01


def test_ten_thousand_is_a_compromise(capsys):
    """Far below it the position cannot be read, far above places meet."""
    found = {}
    for line in printed("clocks_of_other_bases", capsys):
        base, errs, least = re.findall(r"\d[\d.e+]*", line)
        found[float(base)] = float(errs), float(least)
    assert found[100][0] > 100 > 2 > found[1e4][0]
    assert found[1e4][1] > 0.5 > 0.1 > found[1e8][1]


def test_the_mask_matters_when_it_writes_but_not_with_one_layer(capsys):
    lines = printed("writing_without_the_causal_mask", capsys)
    one, *more = last_numbers(lines)
    assert one == 0 and min(more) > 0.01


def test_logarithms_keep_what_probabilities_lose(capsys):
    lost, kept, product = printed("logarithms_of_small_numbers", capsys)
    assert "-inf" in lost and "inf" not in kept
    assert "product 0.0" in product and "-158" in product


def test_one_output_has_as_many_scores_as_there_are_rules(capsys):
    scores = last_numbers(printed("one_output_five_scores", capsys))
    assert len(set(scores)) == len(scores) == 5


def test_a_view_alone_has_the_right_shape_and_the_wrong_numbers(capsys):
    lines = printed("splitting_wrongly", capsys)
    assert "[0, 1, 2]" in lines[1] and "[3, 4, 5]" in lines[2]
    fits = [line.endswith("(3, 8, 5, 7)") for line in lines[3:]]
    assert fits == [True, True, True, False]
    assert lines[-1].endswith("an error")
