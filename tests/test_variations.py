"""Table 3: its rows are counted right, and tried fairly."""

import math

import pytest
import torch

import annotated_transformer as book


def by_hand(vocab=37_000, N=6, d_model=512, d_ff=2048, h=8, d_k=None):
    """The weights of a row, added up part by part."""
    keys, values = h * (d_k or d_model // h), d_model
    attention = 2 * d_model * (keys + values)
    network = 2 * d_model * d_ff + d_ff + d_model
    norm = 2 * d_model
    encoder = attention + network + 2 * norm
    decoder = 2 * attention + network + 3 * norm
    return vocab * d_model + N * (encoder + decoder)


@pytest.mark.parametrize("name", book.TABLE_3)
def test_a_row_of_table_3_has_the_weights_counted_by_hand(name):
    sizes = {
        key: value
        for key, value in book.TABLE_3[name][0].items()
        if key != "dropout"
    }
    assert book.count_row(name) == by_hand(**sizes)


@pytest.mark.parametrize("name", ["(B) d_k = 16", "(C) d_model = 256", "big"])
def test_the_vocabularies_that_fit_a_row_are_all_that_do(name):
    low, high = book.fitting_vocabularies(name)
    printed = book.TABLE_3[name][1]
    fits = [
        abs(book.count_row(name, vocab) / 1e6 - printed) < 0.5
        for vocab in (low - 1, low, high, high + 1)
    ]
    assert fits == [False, True, True, False]


def test_narrow_keys_of_the_same_width_change_nothing():
    model, other = book.tiny_model().eval(), book.tiny_model().eval()
    book.narrow(other, model.config.d_k)
    other.load_state_dict(model.state_dict())
    src, tgt = torch.randint(4, 14, (2, 3, 6))
    torch.testing.assert_close(other(src, tgt), model(src, tgt))


def test_narrow_keys_are_narrow_and_learn():
    model = book.narrow(book.tiny_model(), 2)
    src, tgt = torch.randint(4, 14, (2, 3, 6))
    model(src, tgt).logsumexp(-1).sum().backward()
    layer = model.decoder.layers[1].cross_attention
    assert layer.W_Q.weight.shape == layer.W_K.weight.shape == (2 * 4, 32)
    assert layer.W_V.weight.shape == (32, 32)
    assert all(w.grad.abs().sum() > 0 for w in model.parameters())


def test_scores_of_a_network_are_additive_attention():
    """With A = B = 1, those of Section 3.2.1, beside which nothing changes."""
    model = book.scored(book.narrow(book.tiny_model(), 3), 3, 3).eval()
    part = model.encoder.layers[0].self_attention
    with torch.no_grad():
        for layer in (part.A, part.B):
            layer.weight.copy_(torch.eye(3))
            layer.bias.zero_()
    x, mask = torch.randn(1, 5, 32), torch.ones(5, 5).tril() > 0
    Q, K, V = (part.split(W(x))[0] for W in (part.W_Q, part.W_K, part.W_V))
    heads = []
    for q, k, v in zip(Q, K, V):
        scores = book.additive_scores(q, k, part.w.weight[0])
        heads.append(scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v)
    expected = part.W_O(torch.cat(heads, dim=-1))
    torch.testing.assert_close(part(x, x, x, mask)[0], expected)


def test_networks_for_scores_learn_in_all_attentions():
    model = book.scored(book.narrow(book.tiny_model(), 2), 2, 7)
    src, tgt = torch.randint(4, 14, (2, 3, 6))
    model(src, tgt).logsumexp(-1).sum().backward()
    parts = [m for m in model.modules() if hasattr(m, "W_Q")]
    assert all(type(part) is book.ScoredAttention for part in parts)
    for part in parts:
        for weight in (part.A.weight, part.B.weight, part.w.weight):
            assert weight.grad.abs().sum() > 0
    size = dict(N=1, d_model=8, d_ff=8, h=2)
    train = book.trial.__wrapped__
    assert train(0, 3, d_k=2, hidden=4, **size) != train(0, 3, d_k=2, **size)


def test_surprise_by_hand():
    """Three pairs; after "a" either "b" or the end, once each."""
    train = [["", "a", "b", ""], ["", "a", ""]]
    after_a = (1 + 0.01) / (2 + 3 * 0.01)
    first = (2 + 0.01) / (2 + 3 * 0.01)
    found = book.surprise(train, [["", "a", ""]], vocab=3)
    assert math.isclose(found, -math.log(first) - math.log(after_a))
    chances = [book.surprise(train, [["a", t]], 3) for t in ("", "a", "b")]
    assert math.isclose(sum(math.exp(-c) for c in chances), 1)


def test_the_noisy_language_is_reversed_and_nine_forms_of_ten_are_right():
    right = total = 0
    for src, tgt in book.noisy_pairs(2000, seed=3):
        words = [token - 4 for token in src[:-1]]
        stems, forms = zip(*(divmod(token - 4, 2) for token in tgt[-2:0:-1]))
        assert list(stems) == words
        for form, after in zip(forms, [*words[1:], words[0]]):
            right += form == (after < 8)
            total += 1
    assert 0.88 < right / total < 0.92


def test_held_out_pairs_are_other_draws_for_each_seed():
    draws = [book.noisy_pairs(50, seed) for seed in (0, 1, 1000, 1001)]
    assert all(a != b for a in draws for b in draws if a is not b)


def test_without_a_warm_up_only_the_first_updates_differ():
    plain, sudden = book.Recipe(warmup=10), book.Sudden(warmup=10)
    rates = [(plain.rate(n, 32), sudden.rate(n, 32)) for n in range(1, 30)]
    peak = max(rate for rate, _ in rates)
    assert all(rate == peak for _, rate in rates[:10])
    assert all(a == b for a, b in rates[9:])


def test_a_trial_depends_on_its_seed_and_settings_alone():
    size = dict(N=1, d_model=8, d_ff=8, h=2)
    train = book.trial.__wrapped__
    first = train(0, 6, **size)
    torch.manual_seed(5)
    assert train(0, 6, **size) == first
    assert train(1, 6, **size) != first
    assert train(0, 6, **size, spacing=1).averaged != first.averaged
    assert train(0, 6, **size, spacing=1)[:3] == first[:3]
    assert 0 < first.loss < first.smoothed + 1 < 10
    assert 0 <= first.accuracy <= 1


def test_an_interval_by_hand():
    mean, half = book.interval([1.0, 2.0, 3.0])  # deviation 1, t 4.30
    assert mean == 2
    assert math.isclose(half, 4.30 / math.sqrt(3))


def test_differences_are_of_equal_seeds(monkeypatch):
    def fake(seed, updates, dropout=0.0):
        loss = 10.0 * seed + (dropout if dropout else 0.0)
        return book.Trial(loss, 0.0, 0.0, 0.0)

    monkeypatch.setattr(book, "trial", fake)
    found = book.compared(dict(dropout=0.5), {}, seeds=4, updates=1)
    assert found == (0.5, 0.0)
    assert book.is_worse(dict(dropout=0.5), 4, 1)[0]
    assert not book.is_worse({}, 4, 1)[0]


def test_five_checkpoints_need_updates_enough(monkeypatch):
    with pytest.raises(book.InputError, match="take 241 updates"):
        book.averaging_helps(seeds=2, updates=240, spacing=60)
    mean, many = book.average_weights, []
    monkeypatch.setattr(
        book,
        "average_weights",
        lambda kept: many.append(len(kept)) or mean(kept),
    )
    for updates in (8, 9):  # four times a spacing of two, and one more
        book.trial(0, updates, N=1, spacing=2)
    assert many == [4, 5]


def test_units_are_words_or_what_the_text_is_cut_into():
    with pytest.raises(book.InputError, match="'unit' or 'word'"):
        book.units_change_the_perplexity(per="letter")


def test_the_chart_shows_each_variation_with_its_interval(monkeypatch):
    monkeypatch.setattr(book, "compared", lambda *a, **k: (0.5, 0.25))
    spec = book.EXAMPLES["variations_in_small"]().to_dict()
    points = max(spec["datasets"].values(), key=len)
    assert len(points) == 5
    assert all(
        (p["low"], p["mean"], p["high"]) == (0.25, 0.5, 0.75) for p in points
    )
    assert len(spec["description"]) > 40 and spec["title"]
