"""One example through everything: its prose, its numbers, its weights."""

import inspect
import math
import re
from pathlib import Path

import pytest
import torch

import annotated_transformer as book

SOURCE = Path(book.__file__).read_text(encoding="utf-8")
_, _, SECTION = SOURCE.partition("# ## One example through everything\n")
SECTION = SECTION.partition("\n# ## ")[0]
STEPS = [name for name in book.EXAMPLES if name.startswith("step_")]

NUMBER = r"[-−]?\d+(?:\.\d+)?"
OPERATORS = {"−": "-", "·": "*", "²": "**2", "√": "sqrt "}
TOKEN = r"(?:\d+(?:\.\d+)?|[-−·+/()²√]|exp\b|sin\b|ln\b)"
SIDE = rf"{TOKEN}(?: ?{TOKEN})*"
EQUATION = re.compile(
    rf"(?<![\w.])((?:{SIDE} = )+)({NUMBER})(?! ?[-−·+/] ?[\d(])"
)


def prose():
    """The section's sentences, on one line, code left out."""
    cells = re.split(r"(?m)^# %%", SECTION)
    text = [c for c in cells if c.startswith((" [markdown]", "#"))]
    lines = (line[2:] for c in text for line in c.splitlines()[1:])
    return " ".join(" ".join(lines).split())


def value(expression):
    """What an expression of the prose is, as a calculator has it."""
    for sign, word in OPERATORS.items():
        expression = expression.replace(sign, word)
    atom = r"(\((?:[^()]|\([^()]*\))*\)|-?\d+(?:\.\d+)?)"
    expression = re.sub(rf"(sqrt|exp|sin|ln) *{atom}", r"\1(\2)", expression)
    names = {name: getattr(math, name) for name in ("sqrt", "exp", "sin")}
    return eval(expression, {"ln": math.log, **names})


def equations():
    """[sides of an equation] in the prose."""
    found = []
    for left, right in EQUATION.findall(prose()):
        sides = [*left.strip(" =").split(" = "), right]
        while sides[0].count(")") > sides[0].count("("):
            sides[0] = sides[0].split(")", 1)[1].strip()
        found.append(sides)
    return found


@pytest.fixture(scope="module")
def printed():
    """All that the steps print."""
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        for name in STEPS:
            book.run_seeded(book.EXAMPLES[name])
    return output.getvalue()


def test_all_sums_in_the_prose_are_right():
    found = equations()
    assert len(found) >= 20
    for sides in found:
        digits = len(sides[-1].partition(".")[2])
        error = 1.5 * 10**-digits if digits else 1e-9
        for side in sides[:-1]:
            assert abs(value(side) - value(sides[-1])) <= error, sides


def test_all_decimals_in_the_prose_are_printed_or_worked_out(printed):
    shown = set(re.findall(r"\d+\.\d+", printed))
    worked = {sides[-1].lstrip("−-") for sides in equations()}
    given = {"0.1", "0.9", "0.00001"}  # the smoothing, and a small step
    text = re.sub(r"Sections? [\d.]+( and [\d.]+)?", "", prose())
    used = set(re.findall(r"\d+\.\d+", text))
    assert len(used) > 50
    assert used <= shown | worked | given


def test_all_rows_in_the_prose_stand_in_a_printed_row(printed):
    rows = re.findall(rf"\(({NUMBER}(?:, {NUMBER})+)\)", prose())
    assert len(rows) >= 6
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for row in rows:
        numbers = row.replace("−", "-").replace(",", "")
        assert any(f" {numbers}" in line for line in lines), row


def test_the_matrices_are_small_whole_numbers():
    """So that they can be used on paper."""
    for text in book.HAND_WEIGHTS.values():
        for matrix in book.hand_matrices(text):
            assert set(matrix.unique().tolist()) <= {-1.0, 0.0, 1.0}


def test_the_model_is_the_book_s_own_with_these_weights():
    model = book.hand_model()
    assert type(model) is book.Transformer and not model.training
    for name, parameter in model.named_parameters():
        if "norm.weight" in name:
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
    part = model.decoder.layers[0].cross_attention
    x = torch.randn(3, 4, dtype=torch.double)
    texts = book.HAND_WEIGHTS["decoder.layers.0.cross_attention"]
    maps = (part.W_Q, part.W_K, part.W_V, part.W_O)
    for linear, matrix in zip(maps, book.hand_matrices(texts)):
        torch.testing.assert_close(linear(x), x @ matrix.double())


@pytest.mark.parametrize("names", [("Anna", "Otto"), ("Otto", "Anna")])
def test_it_translates(names):
    one, other = names
    src = book.hand_ids([one, "liebt", other, "</s>"])
    [output] = book.greedy_plain(book.hand_model(), src)
    assert [book.HAND_WORDS[i] for i in output] == [one, "loves", other]


def test_what_is_recorded_is_what_the_model_computes():
    model, logits, seen = book.hand_pass()
    src, tgt = map(book.hand_ids, (book.SRC_WORDS, book.TGT_WORDS))
    torch.testing.assert_close(logits, model(src, tgt[:, :-1])[0])
    assert len(seen["src_embedding"]) == len(seen["position"]) == 2
    memory = seen["encoder.layers.0.residuals.1.norm"][0][1]
    torch.testing.assert_close(memory, model.encode(src)[0])
    for name in ("encoder", "decoder"):
        part = f"{name}.layers.0.self_attention"
        Q, K, V = (seen[f"{part}.W_{k}"][0][1] for k in "QKV")
        assert Q.shape == K.shape == V.shape == (1, 4, 4)
    assert not any(m._forward_hooks for m in model.modules())


def test_shown_scores_give_the_weights(capsys):
    model, _, _ = book.hand_pass()
    layer = "decoder.layers.0.self_attention"
    book.show_weights(layer, "1234", "1234", book.causal_mask(4))
    for line in capsys.readouterr().out.splitlines():
        scores, _, weights = line.partition(" |")
        if line[0] not in "1234":
            continue
        scores = torch.tensor([float(x) for x in scores.split()[1:]])
        weights = torch.tensor([float(x) for x in weights.split()])
        torch.testing.assert_close(scores.softmax(0), weights, atol=2e-3,
                                   rtol=0)  # fmt: skip


@pytest.mark.parametrize("unit", range(3))
def test_one_gradient_by_hand_is_the_slope(unit):
    with torch.no_grad():
        ours = [book.gradient_by_hand(unit, d)[0].item() for d in range(4)]
        for dimension, gradient in enumerate(ours):
            losses = []
            for step in (1e-5, -1e-5):
                model = book.hand_model()
                layer = model.decoder.layers[0]
                layer.feed_forward.W_2.weight[dimension, unit] += step
                losses.append(book.hand_loss(model).item())
            slope = (losses[0] - losses[1]) / 2e-5
            assert math.isclose(slope, gradient, abs_tol=1e-4)


def test_numbers_are_shown_in_eight_characters():
    numbers = (2.0, -0.0, 1e-16, -0.0001, 0.5, -math.inf)
    shown = [book.eight_wide(x) for x in numbers]
    wanted = ["2", "0", "0", "0.000", "0.500", "-inf"]
    assert [x.strip() for x in shown] == wanted
    assert {len(x) for x in shown} == {8}


def test_every_step_belongs_to_the_section():
    assert len(STEPS) >= 12
    for name in STEPS:
        assert inspect.getsource(book.EXAMPLES[name]) in SECTION
