"""Section 5 and the training loop: what is learned from, and how."""

import itertools
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import ONE_THREAD, SCRIPT, same, training_command
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


def test_each_epoch_has_its_own_pairs():
    parts = [random_pairs(9, 4, seed=epoch) for epoch in range(3)]
    batches = book.stream(parts.__getitem__, 10_000)  # one an epoch
    for pairs, batch in zip(parts, batches):
        rows = [[t for t in row if t != PAD] for row in batch.tgt.tolist()]
        assert sorted(rows) == sorted(tgt for _, tgt in pairs)


def pairs_of_the_epoch(epoch):
    """Other pairs in each epoch, and another number of batches."""
    return random_pairs(40 + 7 * epoch, seed=epoch)


@pytest.mark.parametrize("pairs", [random_pairs(), pairs_of_the_epoch])
def test_skipped_batches_are_those_already_seen(pairs):
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


@pytest.mark.parametrize("fused", [True, False])
def test_adam_is_pytorchs_bit_for_bit(fused):
    """In its steps, and in what a checkpoint keeps of it."""
    ends = []
    for make in (book.adam_without_compiler(), torch.optim.Adam):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(3, 5))
        optimizer = make([weight], 0.1, betas=(0.9, 0.98), fused=fused)
        for step in range(6):
            if step == 3:  # as a run that is resumed
                state = optimizer.state_dict()
                optimizer = make([weight], 0.0, fused=fused)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            weight.sin().square().sum().backward()
            optimizer.step()
        assert weight.is_leaf and torch.is_grad_enabled()
        ends.append({"weight": weight, **optimizer.state_dict()["state"][0]})
    assert same(*ends)


TRAIN_TWICE = """
import sys
import annotated_transformer as book
command = sys.argv[1:]
for more in (["--steps", "2"], ["--steps", "4", "--resume"]):
    assert book.main([*command, *more]) == 0
print("torch._dynamo" in sys.modules)
"""


def test_a_training_that_compiles_nothing_loads_no_compiler(few, tmp_path):
    command = training_command(few, tmp_path / "run", 2)
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_TWICE, *map(str, command),
         "--layers", "1", "--d-model", "8", "--heads", "2"],
        env=ONE_THREAD | {"PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resuming after update 2" in done.stderr
    assert done.stdout == "False\n"


@pytest.mark.parametrize("steps, warmup", [(50, 10), (7, 1), (10, 10)])
def test_a_linear_rate_comes_to_rest_after_the_last_update(steps, warmup):
    recipe = Recipe(steps=steps, warmup=warmup, factor=2.0, decay="linear")
    rates = [recipe.rate(n, 64) for n in range(1, steps + 1)]
    peak = book.learning_rate(warmup, 64, warmup, 2.0)
    assert math.isclose(max(rates), peak)
    assert math.isclose(rates[warmup - 1], peak)
    falls = [a - b for a, b in itertools.pairwise(rates[warmup - 1 :])]
    for fall in [*falls, rates[-1]]:  # one step more, and it is 0
        assert math.isclose(fall, peak / (steps + 1 - warmup))


def test_the_rate_is_the_papers_unless_asked_otherwise():
    recipe = Recipe(warmup=30)
    for n in (1, 29, 30, 31, 500):
        assert recipe.rate(n, 64) == book.learning_rate(n, 64, 30)


# 5.4 Dropout


KINDS = pytest.mark.parametrize("kind", [book.Dropout, book.ByteDropout])


@KINDS
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_has_its_rate_and_keeps_the_mean(kind, p):
    y = kind(p)(torch.ones(100_000))
    assert abs((y == 0).float().mean() - p) < 0.01
    assert abs(y.mean() - 1) < 0.03 / (1 - p)


@KINDS
def test_dropout_repeats_from_a_seed_and_not_otherwise(kind):
    drop, x = kind(0.3), torch.ones(3, 5, 7)
    torch.manual_seed(4)
    first, second = drop(x), drop(x)
    torch.manual_seed(4)
    assert drop(x).equal(first) and not first.equal(second)


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (9,), (3, 5, 7)])
@KINDS
def test_dropout_keeps_the_shape_and_the_kind_of_number(kind, shape):
    for number in (torch.float32, torch.float64):
        y = kind(0.3)(torch.ones(shape, dtype=number))
        assert y.shape == shape and y.dtype == number


@KINDS
def test_dropout_changes_nothing_in_evaluation_or_at_rate_zero(kind):
    x = torch.randn(5, 7)
    assert kind(0.3).eval()(x) is x
    assert kind(0.0)(x) is x


@KINDS
def test_the_gradient_of_dropout_is_its_mask(kind):
    x = torch.randn(50, 20, requires_grad=True)
    y = kind(0.4)(x)
    y.sum().backward()
    torch.testing.assert_close(y, x * x.grad)
    assert len(x.grad.unique()) == 2


@KINDS
def test_dropout_of_rows_that_do_not_lie_in_order(kind):
    x = torch.arange(1.0, 61).view(6, 10).T  # not contiguous
    y = kind(0.5)(x)
    assert set((y / x).unique().tolist()) == {0.0, 2.0}


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


def test_an_optimizer_of_some_weights_clips_theirs_alone():
    """As if all others were frozen."""
    pairs = [([5, 6, EOS], [BOS, 5, 6, EOS])] * 20
    recipe = Recipe(steps=3, batch_tokens=60, max_tokens=60, clip=0.1)
    moved = []
    for frozen in (False, True):
        torch.manual_seed(0)
        model = book.tiny_model()
        part = [*model.decoder.layers[-1].feed_forward.parameters()]
        if frozen:
            model.requires_grad_(False)
            for weight in part:
                weight.requires_grad_()
        optimizer = torch.optim.SGD(part, lr=1.0)
        batches = book.stream(pairs, 60)
        for _ in book.training(model, batches, recipe, optimizer):
            pass
        moved.append([weight.detach() for weight in part])
    torch.testing.assert_close(*moved)


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


def test_batches_in_a_list_are_read_one_after_the_other():
    batches = itertools.islice(book.stream(random_pairs(), 100), 3)
    batches, seen = list(batches), []

    def note(model, batch, *rest):
        seen.append(batch)
        return book.backward(model, batch, *rest)

    recipe = Recipe(steps=4, batch_tokens=100, max_tokens=100)
    with pytest.raises(InputError, match="ran out: update 4 wants 1"):
        weights_after(book.tiny_model(), batches, recipe, gradient=note)
    assert seen == batches
    recipe = Recipe(steps=2, batch_tokens=200, max_tokens=100)
    with pytest.raises(InputError, match="update 2 wants 2, and there were 1"):
        weights_after(book.tiny_model(), batches, recipe)


def test_an_update_of_padding_alone_is_refused_and_harms_nothing():
    """0/0 would make every weight NaN, before anything is said."""
    model = book.tiny_model()
    before = [weight.clone() for weight in model.parameters()]
    batch = book.Batch(torch.tensor([[5, 2]]), torch.tensor([[1, 0]]))
    recipe = Recipe(steps=1, batch_tokens=400, max_tokens=400)
    with pytest.raises(InputError, match="update 1 has no target token"):
        weights_after(model, [batch], recipe)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    "gradient", [book.backward, book.backward_in_slices, book.backward_r_drop]
)
def test_what_is_frozen_stays(gradient):
    """The matrix of words, too, whose gradient is in part made by hand."""
    model = book.fast(book.tiny_model())
    matrix = model.tgt_embedding.weight.requires_grad_(False)
    before = matrix.clone()
    recipe = Recipe(steps=2, warmup=1, batch_tokens=400, max_tokens=400)
    batches = book.stream(random_pairs(), 400)
    weights_after(model, batches, recipe, gradient=gradient)
    assert matrix.equal(before)


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


def test_nothing_has_no_score_and_no_padding():
    for score in (lambda: book.perplexity(book.tiny_model(), []),
                  lambda: book.bleu([], []), lambda: book.bleu(["a"], []),
                  lambda: book.pad([])):  # fmt: skip
        with pytest.raises(InputError, match="empty|at least one"):
            score()


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
        (dict(ema=1.0), r"ema must be in \[0, 1\)"),
        (dict(bpe_dropout=1.0), r"bpe_dropout must be in \[0, 1\)"),
        (dict(r_drop=-1.0), "r_drop must be a number from 0 on"),
        (dict(r_drop=math.nan), "r_drop must be a number from 0 on"),
        (dict(factor=0.0), "factor must be a number above 0"),
        (dict(clip=0.0), "clip must be a number above 0"),
        (dict(clip=-1.0), "clip must be a number above 0"),
        (dict(factor=math.nan), "factor must be a number above 0"),
        (dict(decay="fast"), 'decay must be "root" or "linear"'),
    ],
)
def test_impossible_recipes_are_refused(wrong, words):
    with pytest.raises(InputError, match=words):
        Recipe(**wrong)


# R-Drop


def a_batch():
    return book.Batch(*map(book.pad, zip(*random_pairs(7, 5))))


def gradients_of(model, gradient, batch, **how):
    model.zero_grad()
    loss = gradient(model, batch, batch.count(), 0.1, **how)
    return float(loss), [w.grad.clone() for w in model.parameters()]


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 9), vocab=st.integers(2, 9))
def test_disagreement_is_two_divergences_and_its_gradient_too(rows, vocab):
    logits = torch.randn(2, rows, vocab, dtype=torch.double)
    logits.requires_grad_()
    p, q = logits.log_softmax(-1)
    plain = (p.exp() * (p - q)).sum() + (q.exp() * (q - p)).sum()
    ours = book.disagreement(p, q)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(
        torch.autograd.grad(ours, logits, retain_graph=True),
        torch.autograd.grad(plain, logits),
    )
    assert book.disagreement(p, p) == 0 < ours


@pytest.mark.parametrize("alpha", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("rows", [3, 1000])
def test_r_drop_is_its_formula_with_two_dropouts(alpha, rows):
    """The gradient of the formula by autograd alone, in one piece."""
    model, batch = book.tiny_model(dropout=0.3).double(), a_batch()
    torch.manual_seed(3)
    loss, ours = gradients_of(
        model, book.backward_r_drop, batch, alpha=alpha, rows=rows
    )
    torch.manual_seed(3)  # the same dropout once more
    twice = [torch.cat([side, side]) for side in (batch.src, batch.read)]
    logs = model(*twice).log_softmax(-1).chunk(2)
    real = batch.labels != PAD
    first, second = (log[real] for log in logs)  # (R, V)
    assert not first.allclose(second)
    losses = [
        book.smoothed_loss(log, batch.labels[real]) for log in (first, second)
    ]
    mean = sum(losses) / 2
    kl = [
        torch.nn.functional.kl_div(a, b, reduction="sum", log_target=True)
        for a, b in ((first, second), (second, first))
    ]
    whole = (mean + alpha / 4 * sum(kl)) / batch.count()
    plain = torch.autograd.grad(whole, list(model.parameters()))
    torch.testing.assert_close(ours, list(plain))
    assert math.isclose(loss, mean.item(), rel_tol=1e-6)


def test_without_dropout_r_drop_is_plain_training():
    model, batch = book.tiny_model().double(), a_batch()
    torch.testing.assert_close(
        gradients_of(model, book.backward_r_drop, batch, alpha=5.0),
        gradients_of(model, book.backward_in_slices, batch),
    )


# Averages


@pytest.mark.parametrize("layers", [(), (1, 2), (2, 1)])
def test_only_weights_of_one_size_have_a_mean(layers):
    states = [book.tiny_model(N=N).state_dict() for N in layers]
    with pytest.raises(InputError, match="sizes"):
        book.average_weights(states)


def test_a_moving_average_follows_and_ends_at_constant_weights():
    model = book.tiny_model()
    moving = book.MovingAverage(model, 0.9)
    start = [w.detach().clone() for w in model.parameters()]
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    last = 0.0
    for step in range(1, 60):
        moving.update(model, step)
        way = float((moving.weights[0] - start[0]).mean())
        assert last <= way <= 1.0001
        last = way
    assert last > 0.99


def test_a_moving_average_is_the_sum_by_hand():
    model, decay = book.tiny_model(), 0.9
    moving = book.MovingAverage(model, decay)
    expected = model.src_embedding.weight.detach().double().clone()
    for step in range(1, 40):
        with torch.no_grad():
            model.src_embedding.weight.normal_()
        moving.update(model, step)
        kept = min(decay, (1 + step) / (10 + step))
        now = model.src_embedding.weight.detach().double()
        expected = kept * expected + (1 - kept) * now
    torch.testing.assert_close(
        moving.weights[0].double(), expected, rtol=1e-4, atol=1e-5
    )


def test_inside_a_moving_average_the_model_is_the_average():
    model = book.tiny_model()
    moving = book.MovingAverage(model, 0.9)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1
    now = [w.detach().clone() for w in model.parameters()]
    average = [w.clone() for w in moving.weights]
    optimizer = book.adam(model)
    with pytest.raises(KeyError), moving.inside(model):
        torch.testing.assert_close(
            [*map(torch.detach, model.parameters())], average
        )
        assert model.src_embedding.weight is model.tgt_embedding.weight
        raise KeyError
    after = [*model.parameters()]
    assert all(a.equal(b) for a, b in zip(after, now))
    assert all(a.equal(b) for a, b in zip(moving.weights, average))
    known = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(after, known))


@settings(max_examples=20, deadline=None)
@given(number=st.integers(1, 6), shared=st.booleans())
def test_an_average_is_the_mean_and_leaves_its_parts_alone(number, shared):
    states = []
    for _ in range(number):
        states.append(book.tiny_model(shared=shared).state_dict())
    before = [{k: v.clone() for k, v in s.items()} for s in states]
    mean = book.average_weights(iter(states))
    for name in mean:
        stacked = torch.stack([state[name] for state in before])
        torch.testing.assert_close(mean[name], stacked.mean(0))
        assert all(a[name].equal(b[name]) for a, b in zip(states, before))
    tied = mean["src_embedding.weight"].equal(mean["tgt_embedding.weight"])
    assert tied == shared


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_an_average_of_16_bit_weights_loses_nothing(kind):
    states = [{"w": torch.full((3,), 60_000.0).to(kind)} for _ in range(20)]
    states[0]["w"][1] /= 4
    mean = book.average_weights(states)["w"]
    exact = torch.stack([s["w"].double() for s in states]).mean(0)
    assert mean.dtype == kind and mean.equal(exact.to(kind))


# Devices


@pytest.mark.parametrize(
    "cuda, mps, best",
    [
        (True, True, "cuda"),
        (True, False, "cuda"),
        (False, True, "mps"),
        (False, False, "cpu"),
    ],
)
def test_the_best_device_is_picked(cuda, mps, best, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(book, "why_not", lambda name: "")
    assert book.pick_device().type == best


@pytest.mark.parametrize("mps, best", [(True, "mps"), (False, "cpu")])
def test_a_gpu_that_can_not_be_used_is_passed_over(mps, best, monkeypatch):
    """It may be older than the programs of this build of PyTorch."""

    def ones(*sizes, device):
        if device == "cuda":
            raise RuntimeError("no kernel image\nfor it")
        return torch.zeros(sizes)

    monkeypatch.setattr(torch, "ones", ones)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    with pytest.warns(UserWarning, match=r"cuda.* \(no kernel image\)$"):
        assert book.pick_device().type == best


def test_the_device_can_be_set():
    assert book.pick_device("cpu") == torch.device("cpu")
    assert book.pick_device("cpu:9") == torch.device("cpu")  # there is one


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(InputError, match="no device 'abacus' here"):
        book.pick_device("abacus")


def test_of_the_list_of_kernels_that_torch_gives_one_line_is_told(
    monkeypatch,
):
    def fail(*_, **__):
        raise RuntimeError("no such kernel\nCPU: one\nMeta: two")

    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(InputError, match=r"'mps' here \(no such kernel\);"):
        book.pick_device("mps")


def test_the_load_of_a_gpu_is_told(monkeypatch):
    gpu = SimpleNamespace(id=0, load=0.37, memoryUsed=812.0)
    fake = SimpleNamespace(getGPUs=lambda: [gpu, gpu])
    monkeypatch.setitem(sys.modules, "GPUtil", fake)
    assert book.gpu_load() == "GPU 0 37%, 812 MB, GPU 0 37%, 812 MB"


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
