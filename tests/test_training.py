"""Section 5 and the training loop: what is learned from, and how."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, InputError, Recipe


def random_pairs(count=60, longest=12, seed=0):
    torch.manual_seed(seed)
    rows = [
        torch.randint(4, 14, (1 + i % longest,)).tolist() for i in range(count)
    ]
    return [([*row, EOS], [BOS, *row, EOS]) for row in rows]


def weights_after(model, batches, recipe, **options):
    for _ in book.training(model, batches, recipe, **options):
        pass
    return [weight.detach().clone() for weight in model.parameters()]


# 5.1 Batches


@settings(max_examples=50, deadline=None)
@given(
    widths=st.lists(st.integers(1, 60), min_size=1, max_size=200),
    budget=st.integers(60, 400),
)
def test_batches_hold_each_pair_once_within_the_budget(widths, budget):
    groups = book.token_batches(widths, budget)
    assert sorted(itertools.chain(*groups)) == list(range(len(widths)))
    for group in groups:
        assert len(group) * max(widths[i] for i in group) <= budget


def test_a_sentence_over_the_budget_gets_a_batch_of_its_own():
    groups = book.token_batches([5, 90, 5], 20)
    assert [1] in groups
    assert sorted(itertools.chain(*groups)) == [0, 1, 2]


def test_sorting_by_length_leaves_little_padding():
    widths = torch.normal(13, 4, (5000,)).clamp(3, 40).int().tolist()
    assert book.real_share(widths, book.token_batches(widths, 4096)) > 0.93


def test_decoder_input_and_labels_are_one_row_shifted():
    batch = book.Batch(book.pad([[4]]), book.pad([[BOS, 7, 8, EOS], [BOS, 9]]))
    assert batch.read[0].tolist() == [BOS, 7, 8]
    assert batch.labels[0].tolist() == [7, 8, EOS]
    assert batch.count() == 4


def test_no_pair_loses_its_end():
    pairs = random_pairs()
    wanted = sorted(tuple(tgt) for _, tgt in pairs)
    got, epoch = [], book.stream(pairs, 40)
    while len(got) < len(pairs):
        for row in next(epoch).tgt.tolist():
            got.append(tuple(token for token in row if token != PAD))
    assert sorted(got) == wanted


def test_epochs_differ_seeds_differ_and_one_seed_repeats():
    pairs = random_pairs(40, 4)

    def first(seed, count):
        batches = itertools.islice(book.stream(pairs, 10_000, seed), count)
        return [batch.tgt.tolist() for batch in batches]

    assert first(0, 2) == first(0, 2)
    assert first(0, 2)[0] != first(0, 2)[1]
    assert first(0, 1) != first(1, 1)


def test_skipped_batches_are_those_already_seen():
    pairs = random_pairs()
    whole = list(itertools.islice(book.stream(pairs, 40), 50))
    later = list(itertools.islice(book.stream(pairs, 40, skip=30), 20))
    for a, b in zip(whole[30:], later, strict=True):
        assert a.tgt.equal(b.tgt)


# 5.3 Optimizer


def test_the_schedule_rises_to_the_warm_up_and_falls_after():
    rates = [book.learning_rate(n, 512, 400) for n in range(1, 2000)]
    peak = max(range(len(rates)), key=rates.__getitem__) + 1
    assert peak == 400
    assert math.isclose(rates[399], 512**-0.5 * 400**-0.5)
    assert math.isclose(rates[99] * 4, rates[399])
    assert math.isclose(rates[1599] * 2, rates[399])


def test_adam_has_the_settings_of_the_paper():
    (group,) = book.adam(book.tiny_model()).param_groups
    assert group["betas"] == (0.9, 0.98)
    assert group["eps"] == 1e-9
    assert group["weight_decay"] == 0


# 5.4 Label smoothing


@settings(max_examples=30, deadline=None)
@given(smoothing=st.floats(0, 0.9), vocab=st.integers(5, 40))
def test_smoothed_rows_sum_to_one_and_padding_rows_to_zero(smoothing, vocab):
    labels = torch.tensor([PAD, EOS, 4, PAD, 3])
    targets = book.smoothed_targets(labels, vocab, smoothing)
    expected = (labels != PAD).float()
    torch.testing.assert_close(targets.sum(-1), expected)
    assert targets.min() >= 0


def test_smoothing_zero_is_the_plain_loss():
    logits, labels = torch.randn(30, 14), torch.randint(1, 14, (30,))
    plain = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(book.smoothed_loss(logits, labels, 0.0), plain)


# The loop


def test_the_loss_is_the_smoothed_loss_per_real_token():
    model = book.tiny_model()
    pairs = random_pairs(20)
    recipe = Recipe(steps=1, batch_tokens=500, max_tokens=500)
    batch = next(book.stream(pairs, 500))
    logits, labels = model(batch.src, batch.read), batch.labels
    expected = book.smoothed_loss(logits.flatten(0, 1), labels.flatten())
    [update] = book.training(model, book.stream(pairs, 500), recipe)
    assert update.tokens == batch.count()
    assert math.isclose(
        update.loss, expected.item() / batch.count(), rel_tol=1e-5
    )


def test_accumulated_updates_equal_large_ones():
    pairs = random_pairs(64)
    parts = [
        book.Batch(*map(book.pad, zip(*pairs[i : i + 16])))
        for i in range(0, 64, 16)
    ]
    wholes = [
        book.Batch(*map(book.pad, zip(*pairs[i : i + 32]))) for i in (0, 32)
    ]
    small = Recipe(steps=2, warmup=1, batch_tokens=80, max_tokens=40)
    large = Recipe(steps=2, warmup=1, batch_tokens=80, max_tokens=80)
    assert (small.accumulate, large.accumulate) == (2, 1)
    torch.manual_seed(0)
    one = book.tiny_model().double()
    other = book.tiny_model().double()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(
        weights_after(one, iter(parts), small),
        weights_after(other, iter(wholes), large),
    )


def test_the_model_trains_with_dropout_whatever_the_caller_left():
    model = book.tiny_model(dropout=0.1)
    recipe = Recipe(steps=3, batch_tokens=40, max_tokens=40)
    seen = []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.training))
    model.encoder.register_forward_pre_hook(
        lambda m, _: seen.append(m.training)
    )
    for _ in book.training(model, book.stream(random_pairs(), 40), recipe):
        model.eval()
    assert len(seen) >= 3 and all(seen)


def test_clipping_bounds_the_gradient():
    model = book.tiny_model()
    recipe = Recipe(steps=1, batch_tokens=400, max_tokens=400, clip=0.01)
    weights_after(model, book.stream(random_pairs(), 400), recipe)
    squares = [w.grad.square().sum() for w in model.parameters()]
    assert math.isclose(math.sqrt(sum(squares)), 0.01, rel_tol=1e-3)


def test_gradients_of_one_update_do_not_leak_into_the_next():
    model, pairs = book.tiny_model(), random_pairs()
    recipe = Recipe(steps=2, warmup=10**9, batch_tokens=400, max_tokens=400)
    gradients = []  # with so long a warm-up the weights hardly move
    batch = next(book.stream(pairs, 400))
    for _ in book.training(model, itertools.repeat(batch), recipe):
        gradients.append(model.src_embedding.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_a_small_model_learns_its_training_set():
    pairs = random_pairs(12, 4)
    recipe = Recipe(
        steps=300,
        warmup=50,
        factor=0.3,
        batch_tokens=200,
        max_tokens=200,
        smoothing=0.0,
    )
    model = book.tiny_model()
    before = book.perplexity(model, pairs)
    weights_after(model, book.stream(pairs, 200), recipe)
    assert before > 10
    assert book.perplexity(model, pairs) < 1.1
    assert book.exact_matches(model, pairs) == 12


def test_perplexity_knows_neither_smoothing_nor_padding():
    model, pairs = book.tiny_model().eval(), random_pairs(10)
    total, count = 0.0, 0
    for src, tgt in pairs:  # one at a time: no padding at all
        logits = model(torch.tensor([src]), torch.tensor([tgt[:-1]]))[0]
        labels = torch.tensor(tgt[1:])
        total -= logits.log_softmax(-1)[range(len(labels)), labels].sum()
        count += len(labels)
    expected = math.exp(total.item() / count)
    assert math.isclose(book.perplexity(model, pairs), expected, rel_tol=1e-4)


@pytest.mark.parametrize(
    "wrong, words",
    [
        (dict(steps=0), "steps must be at least 1"),
        (dict(warmup=0), "warmup must be at least 1"),
        (dict(max_tokens=0), "max_tokens must be at least 1"),
        (dict(smoothing=1.0), r"smoothing must be in \[0, 1\)"),
    ],
)
def test_impossible_recipes_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        Recipe(**wrong)


# Devices


def test_the_device_is_picked_and_can_be_set():
    assert book.pick_device().type in ("cuda", "mps", "cpu")
    assert book.pick_device("cpu") == torch.device("cpu")


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="no device 'abacus' here"):
        book.pick_device("abacus")


def test_no_gpu_no_load():
    text = book.gpu_load()
    assert isinstance(text, str)
    if not torch.cuda.is_available():
        assert text == ""


# Copying


def test_the_copy_sets_share_nothing():
    train, val, test = (
        {tuple(src) for src, _ in part} for part in book.copy_sets()
    )
    assert (len(train), len(val), len(test)) == (40_000, 1000, 1000)
    assert not (train & val or train & test or val & test)
