"""Section 3: what a Transformer must do, whatever its weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, Config, InputError

ORDERS = pytest.mark.parametrize("norm_first", [False, True])


def model_and_batch(norm_first=False, **changes):
    model = book.tiny_model(norm_first=norm_first, **changes).eval()
    src = book.pad([[4, 5, 6, EOS], [7, EOS], [8, 9, EOS]])
    tgt = book.pad([[BOS, 5, 6, 7, 8], [BOS, 9], [BOS, 4, 5]])
    return model, src, tgt


@ORDERS
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_the_future_changes_nothing(norm_first, data):
    model, src, _ = model_and_batch(norm_first)
    T = data.draw(st.integers(2, 9))
    word = st.integers(4, 13)
    row = st.lists(word, min_size=T, max_size=T)
    tgt = torch.tensor(data.draw(st.lists(row, min_size=3, max_size=3)))
    t = data.draw(st.integers(1, T - 1))
    changed = tgt.clone()
    changed[:, t:] = torch.tensor(data.draw(row))[t:]
    before, after = model(src, tgt), model(src, changed)
    torch.testing.assert_close(after[:, :t], before[:, :t])


@ORDERS
@settings(max_examples=25, deadline=None)
@given(more_src=st.integers(0, 6), more_tgt=st.integers(0, 6))
def test_padding_changes_nothing(norm_first, more_src, more_tgt):
    model, src, tgt = model_and_batch(norm_first)
    wide_src = torch.nn.functional.pad(src, (0, more_src))
    wide_tgt = torch.nn.functional.pad(tgt, (0, more_tgt))
    real = tgt != PAD
    torch.testing.assert_close(
        model(wide_src, wide_tgt)[:, : tgt.size(1)][real],
        model(src, tgt)[real],
    )


@ORDERS
def test_a_sentence_is_the_same_alone_and_in_company(norm_first):
    model, src, tgt = model_and_batch(norm_first)
    together = model(src, tgt)
    for i in range(len(src)):
        S, T = int((src[i] != PAD).sum()), int((tgt[i] != PAD).sum())
        alone = model(src[i : i + 1, :S], tgt[i : i + 1, :T])
        torch.testing.assert_close(together[i, :T], alone[0])


def test_a_row_of_padding_alone_stays_finite():
    model, src, tgt = model_and_batch()
    src[1], tgt[1] = PAD, PAD
    logits = model(src, tgt)
    assert logits.isfinite().all()
    logits.sum().backward()
    assert all(w.grad.isfinite().all() for w in model.parameters())


def test_masks_are_boolean_and_true_means_may_attend():
    tokens = torch.tensor([[5, 6, PAD]])
    assert book.padding_mask(tokens).tolist() == [[[[True, True, False]]]]
    assert book.causal_mask(2).tolist() == [[True, False], [True, True]]
    assert book.target_mask(tokens)[0, 0].tolist() == [
        [True, False, False],
        [True, True, False],
        [True, True, False],
    ]


def test_layers_start_from_different_weights():
    model = book.tiny_model(N=3)
    for stack in (model.encoder, model.decoder):
        first, second, third = (
            layer.self_attention.W_Q.weight for layer in stack.layers
        )
        assert not first.equal(second)
        assert not second.equal(third)


def test_shared_matrices_are_one_object():
    shared, apart = book.tiny_model(), book.tiny_model(shared=False)
    assert shared.src_embedding.weight is shared.tgt_embedding.weight
    assert apart.src_embedding.weight is not apart.tgt_embedding.weight
    saved = book.parameter_count(apart) - book.parameter_count(shared)
    assert saved == 14 * 32


def test_the_output_matrix_is_the_target_embedding():
    model, src, tgt = model_and_batch(shared=False)
    before = model(src, tgt)
    with torch.no_grad():
        model.tgt_embedding.weight[13] *= 2  # a word that is not read
    torch.testing.assert_close(model(src, tgt)[..., 13], 2 * before[..., 13])


def test_any_length_has_a_position():
    model = book.tiny_model().eval()
    src = torch.randint(4, 14, (1, 700))  # longer than the first table
    before = model.encode(src[:, :100])[0]
    assert model.encode(src)[0].isfinite().all()
    assert model.encode(src[:, :100])[0].equal(before)


def test_positions_differ_and_stay_between_minus_one_and_one():
    encoding = book.positional_encoding(500, 64)
    assert encoding.abs().max() <= 1
    distances = torch.cdist(encoding, encoding) + 9 * torch.eye(500)
    assert distances.min() > 0.1


def test_positions_are_the_formula_of_the_paper():
    import math

    encoding = book.positional_encoding(50, 8)
    for position in (0, 1, 17, 49):
        for i in range(4):
            angle = position / 10000 ** (2 * i / 8)
            row = encoding[position]
            assert math.isclose(row[2 * i], math.sin(angle), abs_tol=1e-6)
            assert math.isclose(row[2 * i + 1], math.cos(angle), abs_tol=1e-6)


def test_an_odd_width_has_no_sines_and_cosines():
    with pytest.raises(book.InputError, match="d_model=5"):
        book.positional_encoding(3, 5)


@pytest.mark.parametrize("text", ["7 1", "12a", "\u0663"])
def test_digits_takes_digits_only(text):
    with pytest.raises(book.InputError, match=repr(text)):
        book.digits(text)


def test_weights_kept_for_looking_are_those_before_dropout():
    model, src, tgt = model_and_batch(attention_dropout=0.5)
    model(src, tgt)
    kept = [
        module.weights
        for module in model.modules()
        if isinstance(module, book.MultiHeadAttention)
    ]
    assert len(kept) == 6
    for weights in kept:
        sums = weights.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_no_weights_are_kept_in_training():
    model, src, tgt = model_and_batch()
    model(src, tgt)
    model.train()(src, tgt)
    assert all(getattr(m, "weights", None) is None for m in model.modules())


def test_attention_dropout_reaches_the_attention():
    torch.manual_seed(0)
    model, src, tgt = model_and_batch(attention_dropout=0.5)
    model.train()
    assert not model(src, tgt).equal(model(src, tgt))


def test_each_dropout_of_the_configuration_is_used():
    model = book.tiny_model(dropout=0.25, attention_dropout=0.125)
    rates = [m.p for m in model.modules() if isinstance(m, book.Dropout)]
    assert rates.count(0.125) == 6  # one for each attention
    assert rates.count(0.25) == 2 * 2 + 2 * 3 + 1  # sub-layers, embedding


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(d_model=100, h=8), "d_model=100 is not divisible by h=8"),
        (dict(d_model=9, h=3), "must be even"),
        (dict(N=0), "N must be at least 1"),
        (dict(h=0), "h must be at least 1"),
        (dict(src_vocab=0), "src_vocab must be at least 1"),
        (dict(dropout=1.0), r"dropout must be in \[0, 1\)"),
        (dict(src_vocab=7, tgt_vocab=8), "src_vocab == tgt_vocab, not 7 and"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        Config(**wrong)


def test_presets_have_the_sizes_of_table_3():
    base, big = (Config(**book.PRESETS[name]) for name in ("base", "big"))
    assert (base.N, base.d_model, base.d_ff, base.h) == (6, 512, 2048, 8)
    assert (big.N, big.d_model, big.d_ff, big.h) == (6, 1024, 4096, 16)
    assert (base.d_k, big.d_k) == (64, 64)
    assert (base.dropout, big.dropout) == (0.1, 0.3)
    assert base == Config()
    assert not base.norm_first
    assert base.attention_dropout == 0


@pytest.mark.parametrize("rows", [[], book.digits("12")])
def test_what_is_no_list_of_sentences_is_not_padded(rows):
    with pytest.raises(book.InputError, match="list"):
        book.pad(rows)
