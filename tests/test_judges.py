"""Exercises that are judged by properties: each slip is told its own fault."""

import math

import pytest
import torch

import annotated_transformer as book

SAID = {
    "turning_in_loops": {
        "pairs left apart": "(6, 4, 2)",
        "it adds": "at position 0",
        "both sines have one sign": "length changes",
        "the angle is not in proportion to the position": "q·k changes",
        "i stands for 2i": "not by the angles",
    },
    "decoder_alone": {
        "states, no logits": "(3, 6, 32)",
        "the future is open": "words of the future",
        "no positions": "order of earlier words",
        "not tied": "8864 weights",
        "shifted twice": "shifted already",
        "probabilities": "leave the softmax to the loss",
        "their logarithms": "leave the softmax to the loss",
    },
    "turning_attention": {
        "positions are added": "padding on the left",
        "no positions at all": "order of earlier words",
        "turned before the split": "not pair i of each head",
    },
}


@pytest.mark.parametrize("name", SAID)
def test_each_slip_is_told_its_own_fault(name):
    exercise = book.EXERCISES[name]
    assert exercise.slips.keys() == SAID[name].keys()
    for slip, words in SAID[name].items():
        assert words in exercise.verdict(exercise.slips[slip]), slip


def turned_halves(x, places, sign=1):
    """Pairs (i, i + K/2), as many published models have them."""
    a, b = x.chunk(2, dim=-1)
    speeds = 10_000 ** (-torch.arange(0, x.size(1), 2) / x.size(1))
    angles = sign * places[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


@pytest.mark.parametrize(
    "turn",
    [
        book.EXERCISES["turning_in_loops"].spec,
        turned_halves,
        lambda x, places: turned_halves(x, places, sign=-1),
    ],
)
def test_all_ways_of_turning_pairs_are_right(turn):
    assert book.EXERCISES["turning_in_loops"].verdict(turn) == ""


def test_what_is_no_tensor_is_no_crash_of_the_readers_code():
    class Wrapped(book.SlippedDecoder):
        def forward(self, tokens):
            return (super().forward(tokens),)

    for name, answer, kind in (
        ("turning_in_loops", lambda x, places: x.tolist(), "list"),
        ("decoder_alone", Wrapped, "tuple"),
    ):
        said = book.EXERCISES[name].verdict(answer)
        assert f"should be a tensor, and is of type {kind}" in said


def test_a_decoder_whose_layers_are_hidden_from_torch_is_refused():
    class Hidden(book.SlippedDecoder):
        def __init__(self, config):
            super().__init__(config)
            layers, self.stack = self.stack.layers, None
            self.layers = list(layers)

        def forward(self, tokens):
            x = self.position(self.embedding(tokens))
            for layer in self.layers:
                x = layer(x, self.mask(tokens))
            return self.output.logits(x)

    assert "known to torch" in book.EXERCISES["decoder_alone"].verdict(Hidden)


def summed(states, labels, weight):
    return torch.nn.functional.cross_entropy(
        states @ weight.T, labels, ignore_index=book.PAD, reduction="sum"
    )


def test_parts_may_be_added_up_in_any_way_but_not_kept_all_at_once():
    def late(weight, parts):
        weight = weight.clone().requires_grad_()
        tokens = sum((labels != book.PAD).sum() for _, labels in parts)
        (sum(summed(*part, weight) for part in parts) / tokens).backward()
        return weight.grad

    def one_by_one(weight, parts):
        weight, total = weight.clone().requires_grad_(), 0
        tokens = sum((labels != book.PAD).sum() for _, labels in parts)
        for part in parts:
            loss = summed(*part, weight) / tokens
            total = total + torch.autograd.grad(loss, weight)[0]
        return total

    def without_autograd(weight, parts):
        total, tokens = torch.zeros_like(weight), 0
        for states, labels in parts:
            real = labels != book.PAD
            wrong = (states @ weight.T).softmax(-1)
            wrong[torch.arange(len(labels)), labels] -= 1
            total += (wrong * real[:, None]).T @ states
            tokens += real.sum()
        return total / tokens

    exercise = book.EXERCISES["gradient_of_the_whole"]
    for answer in (one_by_one, without_autograd):
        assert exercise.verdict(answer) == ""
    for answer in (late, exercise.spec):
        assert "all parts are in memory" in exercise.verdict(answer)
    for words, slip in exercise.slips.items():
        assert exercise.verdict(slip) == words


def test_an_ensemble_may_have_any_number_of_models():
    def of_three(logits):
        return logits.log_softmax(-1).logsumexp(0) - math.log(3)

    exercise = book.EXERCISES["ensemble_in_loops"]
    assert "should be" in exercise.verdict(of_three)
    for words, slip in exercise.slips.items():
        assert exercise.verdict(slip) == words


def test_the_heads_may_be_added_up_by_einsum():
    def added(heads, W_O):
        rows = W_O.unflatten(0, heads.shape[1::2])
        return torch.einsum("bhtk,hkd->btd", heads, rows)

    assert book.EXERCISES["sum_of_heads_in_loops"].verdict(added) == ""


def test_a_function_among_the_inputs_is_named_in_words():
    exercise = book.EXERCISES["reach_by_nudging"]

    def sees_one(f, x):
        seen = torch.zeros(len(x), len(x), dtype=torch.bool)
        seen[0, -1] = True
        return seen

    said = exercise.verdict(sees_one)
    assert "a function" in said and "0x" not in said


def in_two_loops(q, blocks):
    blocks = iter(blocks)
    top = max((K @ q).max() for K, _ in blocks) / math.sqrt(len(q))
    shares = [((K @ q / math.sqrt(len(q)) - top).exp(), V) for K, V in blocks]
    return sum(w @ V for w, V in shares) / sum(w.sum() for w, _ in shares)


def with_the_first_by_itself(q, blocks):
    blocks = iter(blocks)
    K, V = next(blocks)
    scores = K @ q / math.sqrt(len(q))
    top = scores.max()
    total, mean = (scores - top).exp().sum(), scores.softmax(0) @ V
    for K, V in blocks:
        scores = K @ q / math.sqrt(len(q))
        before, top = top, torch.maximum(top, scores.max())
        old, new = total * (before - top).exp(), (scores - top).exp()
        total = old + new.sum()
        mean = (mean * old + new @ V) / total
    return mean


def test_who_reads_passing_keys_twice_is_told_that_they_come_once():
    exercise = book.EXERCISES["attention_at_once"]
    assert "come once: a second loop" in exercise.verdict(in_two_loops)
    assert exercise.verdict(with_the_first_by_itself) == ""


def test_a_black_box_may_hide_what_the_sum_of_an_output_does_not_show():
    """An output's sum, with no slip of that name, must not be taken."""
    exercise = book.EXERCISES["reach_by_nudging"]

    def of_summed_outputs(f, x):
        jacobian = torch.autograd.functional.jacobian
        return (jacobian(lambda x: f(x).sum(-1), x).abs() > 1e-6).any(-1)

    assert exercise.verdict(of_summed_outputs)
