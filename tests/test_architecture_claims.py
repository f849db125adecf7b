"""The claims about the architecture: their instruments, and what they notice.

That each comes out as recorded, and otherwise under `unless`, is tried in
test_claims.py; here the model is broken, not the setting.
"""

from dataclasses import replace

import pytest
import torch
from test_checks import SOURCE, load

import annotated_transformer as book

# A slip in the model, and the claim that must come out otherwise for it.
SLIPS = {
    "the norm before the sum": (
        "return self.norm(x + self.drop(sublayer(x)))",
        "return x + self.norm(self.drop(sublayer(x)))",
        "residual_then_norm",
    ),
    "dropout after the sum": (
        "return self.norm(x + self.drop(sublayer(x)))",
        "return self.norm(self.drop(x + sublayer(x)))",
        "dropout_falls_in_two_places",
    ),
    "dropout of the embedding alone": (
        "return self.drop(x + self.table[start:end])",
        "return self.drop(x) + self.table[start:end]",
        "dropout_falls_in_two_places",
    ),
    "eight heads of another width": (
        "h: int = 8  # heads",
        "h: int = 4  # heads",
        "defaults_are_the_papers",
    ),
    "five layers": (
        "N: int = 6  #",
        "N: int = 5  #",
        "six_layers_of_one_form",
    ),
    "the future one step too near": (
        "return full.tril()",
        "return full.tril(1)",
        "causality_as_a_jacobian",
    ),
    "the past cut off": (
        "return full.tril()",
        "return full.tril().triu(-3)",
        "predictions_know_what_is_before",
    ),
    "heads cut across positions": (
        "return x.unflatten(-1, (self.h, self.d_k)).transpose(1, 2)",
        "return x.reshape(x.size(0), self.h, -1, self.d_k)",
        "averaging_inhibits",
    ),
    "only the nearest keys": (
        "    scores = Q @ K.transpose(-2, -1) / math.sqrt(K.size(-1))",
        "    mask = torch.ones(Q.size(-2), K.size(-2)).tril(1) > 0\n"
        "    scores = Q @ K.transpose(-2, -1) / math.sqrt(K.size(-1))",
        "all_of_the_source_is_seen",
    ),
    "a network that looks around": (
        "hidden = self.W_1(x).relu()",
        "hidden = self.W_1(x - x.mean(-2, keepdim=True)).relu()",
        "network_is_two_convolutions",
    ),
    "divided by the root": (
        "return F.embedding(tokens, self.weight) * self.scale",
        "return F.embedding(tokens, self.weight) / self.scale",
        "embeddings_times_the_root",
    ),
    "tied by value only": (
        "self.src_embedding  # one object, not a copy",
        "copy.deepcopy(self.src_embedding)",
        "one_matrix_for_three",
    ),
    "a source read from left to right": (
        "        mask = padding_mask(src)\n        x = self.position(",
        "        mask = target_mask(src)\n        x = self.position(",
        "order_comes_from_positions",
    ),
    "one hand's coordinate twice": (
        "waves = torch.stack([angle.sin(), angle.cos()], dim=-1)",
        "waves = torch.stack([angle.sin(), angle.sin()], dim=-1)",
        "shift_found_by_least_squares",
    ),
    "gaps that only double": (
        "kernel, k**number if dilated else 1)",
        "kernel, 2**number if dilated else 1)",
        "convolutions_must_be_stacked",
    ),
    "waves of even spacing": (
        "angle = position / 10_000 ** (two_i / d_model)",
        "angle = position / (1 + 10_000 * two_i / d_model)",
        "wavelengths_are_geometric",
    ),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_claim_notices(slip):
    right, wrong, name = SLIPS[slip]
    assert right in SOURCE, "the source has changed: bring the slip up to date"
    broken = load(SOURCE.replace(right, wrong, 1), "broken_book")
    verdict = broken.CLAIMS[name].verdict()[0]
    assert verdict != book.CLAIMS[name].verdict()[0]


def test_multiplications_are_those_of_the_products():
    def two(x, W):
        return (x @ W).tanh() @ W.T + 1

    assert book.multiplications(two, (3, 5), (5, 7)) == 2 * 3 * 5 * 7


def test_turns_are_the_longest_chain_and_not_all_products():
    x = torch.randn(4, 4, requires_grad=True)
    wide = sum(x @ x for _ in range(5))
    assert book.turns(wide) == 1
    assert book.turns(wide @ x.tanh() + (x @ x)) == 2


def test_depends_sees_through_what_sums_to_nothing():
    """A normalized row sums to 0, whatever it depends on."""
    x = torch.randn(5, 8, requires_grad=True)
    y = torch.nn.functional.layer_norm(x.cumsum(0), (8,))
    assert book.depends(y, x).equal(torch.ones(5, 5).tril() > 0)


def test_depends_on_nothing():
    x = torch.randn(5, 8, requires_grad=True)
    assert not book.depends(torch.ones(3, 8), x).any()


@pytest.mark.parametrize("n, r", [(12, 5), (4, 9), (7, 1)])
def test_neighbours_are_those_within_the_text(n, r):
    x = torch.randn(n, 3, dtype=torch.double)
    found, masked = (book.neighbours(x, r, m) for m in (False, True))
    torch.testing.assert_close(found, masked)


def test_claims_hold_beyond_the_tables_and_for_no_offset():
    assert book.order_comes_from_positions(words=300)[0]
    assert book.shift_found_by_least_squares(offsets=(0, 3))[0]
    assert book.one_matrix_looks_back(offsets=(0, 3))[0]


def test_width_1_never_spans_a_sentence(capsys):
    book.cost_of_a_layer(k=1)
    assert capsys.readouterr().out.count(" inf\n") == 2


def test_a_twin_has_the_kind_of_its_model():
    model, x = book.tiny_model().eval(), torch.randn(2, 5, 32)
    assert book.torch_twin(model).eval()(x, x).dtype == torch.float32


def test_a_twin_has_as_many_layers_in_each_stack_as_its_model():
    model = book.tiny_model().eval()
    deeper = replace(model.config, N=3)
    model.encoder = book.Stack(book.EncoderLayer, deeper).eval()
    twin = book.torch_twin(model).eval()
    x, y = torch.randn(2, 2, 5, 32)
    none = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    memory = model.encoder(x, none)
    torch.testing.assert_close(twin.encoder(x), memory)
    found = model.decoder(y, memory, none, none)
    torch.testing.assert_close(twin.decoder(y, memory), found)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_one_convolution_connects_a_band_and_a_stack_all(k):
    n = 12
    x = torch.randn(n, 4, dtype=torch.double, requires_grad=True)
    full = torch.ones(n, n).tril()
    band = full.triu(1 - k) > 0
    assert book.depends(book.convolutions(k)(x, 0), x).equal(band)
    needed = -(-(n - 1) // (k - 1))  # each layer looks k - 1 back
    layer, y = book.convolutions(k, dilated=False), x
    assert book.layers_between(layer, n - 1) == needed
    for number in range(needed):
        assert not book.depends(y, x).equal(full > 0)
        y = layer(y, number)
    assert book.depends(y, x).equal(full > 0)


@pytest.mark.parametrize(
    "name, settings",
    [
        ("paths_of_table_1", {"k": 2}),
        ("paths_of_table_1", {"k": 5}),
        ("paths_of_table_1", {"lengths": (10, 100)}),
        ("steps_between_positions", {"distances": (10, 100)}),
        ("all_of_the_source_is_seen", {"S": 4, "T": 6}),
        ("network_is_two_convolutions", {"T": 4}),
    ],
)
def test_what_is_true_of_other_sizes_is_found_true(name, settings):
    """A reader may change them; only `unless` makes the claim false."""
    claim = book.CLAIMS[name]
    assert claim.verdict(**settings)[0] == "verified"
    assert claim.verdict(**settings | claim.unless)[0] == "not reproduced"


def test_convolutions_of_even_width_are_no_network_either():
    claim = book.CLAIMS["network_is_two_convolutions"]
    assert claim.verdict(width=2)[0] == "not reproduced"


def test_layers_that_never_relate_two_places_are_an_error():
    with pytest.raises(book.InputError, match="8 layers do not relate"):
        book.paths_of_table_1(k=1)


@pytest.mark.parametrize("power", [-1, 0, 0.5, 2])
def test_growth_is_the_exponent(power):
    sizes = [3, 10, 40]
    found = book.growth(sizes, [7 * n**power for n in sizes])
    assert found == pytest.approx(power, abs=1e-9)


def test_kept_numbers_count_a_tensor_once():
    x = torch.randn(10, requires_grad=True)
    assert book.kept_numbers(lambda x: x * x, x) == 10
    assert book.kept_numbers(lambda x: (x * x).exp(), x) == 20


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_a_linear_recurrence_is_the_same_by_doubling(n):
    x, keep = torch.randn(n, 3), torch.rand(3)
    states = [torch.zeros(3)]
    for row in x:
        states.append(keep * states[-1] + row)
    expected = torch.stack(states[1:])
    torch.testing.assert_close(book.doubling(x, keep), expected)


def test_attention_to_all_neighbours_is_attention():
    """Both forms of restricted attention, and all of it once r is large."""
    x = torch.randn(9, 4, dtype=torch.double)
    masked = book.neighbours(x, 3, masked=True)
    inner = book.neighbours(x, 3)[1:-1]  # its margins see zeros
    torch.testing.assert_close(inner, masked[1:-1])
    whole = book.neighbours(x, 19, masked=True)
    torch.testing.assert_close(whole, (x @ x.T).softmax(-1) @ x)


def test_the_best_map_of_rank_m_misses_half():
    """The bound on one head: m of 2m equal singular values are lost."""
    m, weight = 3, torch.rand(())
    wanted = torch.eye(2 * m)
    for W in torch.randn(20, 2 * m, m):  # any head: [w·W, (1 - w)·W]
        head = torch.cat([weight * W, (1 - weight) * W], dim=1)
        assert (head - wanted).square().sum() / (2 * m) >= 0.5


def test_learned_positions_learn_and_their_lack_says_nothing():
    model = book.copier("learned", updates=1)
    assert model.position.table.grad.abs().sum() > 0
    model = book.copier("no", updates=1)
    assert not model.position.table.any()
