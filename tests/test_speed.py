"""Making it fast: each fast form computes what the plain one does."""

import copy
import gc
import itertools
import mmap
import os
import platform
import re
import subprocess
import sys
import weakref
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parametrize, prune

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD

ROOT = Path(__file__).resolve().parent.parent
SIZES = dict(N=2, d_model=16, d_ff=16, h=2)


def some_batches():
    """A few batches with padding on both sides."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        rows = [
            torch.randint(4, 14, (n,), generator=draw).tolist()
            for n in torch.randint(1, 12, (6,), generator=draw).tolist()
        ]
        src = book.pad([[*row, EOS] for row in rows])
        yield book.Batch(
            src, book.pad([[BOS, *row[::-1], EOS] for row in rows])
        )


def long_attention(model):
    """Let every text be too long for our own formula."""
    book.exchange(model, {book.MultiHeadAttention: book.FusedAttention})
    for part in model.modules():
        part.short = 0
    return model


FORMS = {
    "slices": (book.plain, partial(book.backward_in_slices, rows=7)),
    "bytes": (
        lambda model: book.exchange(model, {book.Dropout: book.ByteDropout}),
        book.backward,
    ),
    "attention": (
        lambda model: book.exchange(
            model, {book.MultiHeadAttention: book.FusedAttention}
        ),
        book.backward,
    ),
    "torch's attention": (long_attention, book.backward),
    "all": (book.fast, book.backward_in_slices),
    "oneDNN": (
        partial(book.fast, onednn=True),
        partial(book.backward_in_slices, onednn=True),
    ),
}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_gives_the_values_gradients_and_updates(form, norm_first):
    """Without dropout: one gradient, then twenty updates."""
    change, gradient = FORMS[form]
    recipe = book.Recipe(steps=20, warmup=20, batch_tokens=99, max_tokens=99)
    results = []
    for one, other in ((book.plain, book.backward), (change, gradient)):
        torch.manual_seed(0)
        model = one(book.tiny_model(norm_first=norm_first).double().train())
        batch = next(some_batches())
        model.zero_grad()
        loss = other(model, batch, 17, 0.1)
        gradients = [w.grad.clone() for w in model.parameters()]
        updates = book.training(
            model, itertools.cycle(some_batches()), recipe, gradient=other
        )
        losses = [update.loss for update in updates]
        results.append((loss, gradients, losses, model.state_dict()))
    one, other = results
    torch.testing.assert_close(other[0], one[0])
    torch.testing.assert_close(other[1], one[1])
    torch.testing.assert_close(other[2], one[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other[3], one[3], rtol=1e-3, atol=1e-5)
    assert one[2][-1] < 0.9 * one[2][0]  # it did learn


def test_fused_adam_makes_the_steps_of_the_plain_one():
    ends = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = book.tiny_model()
        recipe = book.Recipe(
            steps=20, warmup=20, batch_tokens=99, max_tokens=99
        )
        batches = itertools.cycle(some_batches())
        optimizer = book.adam(model, fused)
        assert optimizer.defaults["fused"] is fused
        list(book.training(model, batches, recipe, optimizer))
        ends.append(model.state_dict())
    torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-4)


def test_plain_takes_back_what_fast_did():
    model = book.tiny_model(dropout=0.1, attention_dropout=0.1)
    classes = [type(part) for part in model.modules()]
    book.fast(model, half=True)
    assert {
        book.ByteDropout,
        book.FusedAttention,
        book.HalfLinear,
        book.HalfFeedForward,
    } <= {type(part) for part in model.modules()}
    without = [type(part) for part in book.fast(model).modules()]
    assert book.HalfLinear not in without
    assert {book.ByteDropout, book.FusedAttention} <= {*without}
    book.plain(model)
    assert [type(part) for part in model.modules()] == classes


@pytest.mark.parametrize("short", [0, 24])
def test_fast_attention_drops_weights_in_training_only(short, monkeypatch):
    monkeypatch.setattr(book.FusedAttention, "short", short)
    model = book.fast(book.tiny_model(attention_dropout=0.5))
    batch = next(some_batches())
    look = partial(model.states, batch.src, batch.read)
    assert not look().equal(look())
    model.eval()
    assert look().equal(look())


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_fast_attention_drops_as_many_weights_as_asked_for(rate):
    """Where all are alike and the values a unit matrix, one sees each."""
    torch.manual_seed(0)
    T = 64
    config = book.Config(
        9, 9, N=1, d_model=T, d_ff=8, h=1, attention_dropout=rate
    )
    part = book.MultiHeadAttention(config)
    with torch.no_grad():
        for weight in part.parameters():
            weight.zero_()
        part.W_V.weight.copy_(torch.eye(T))
        part.W_O.weight.copy_(torch.eye(T))
    part = book.fast(part).train()
    x = torch.eye(T).expand(50, T, T)
    with torch.no_grad():
        weights = part(x, x, x)
    dropped = (weights == 0).float().mean().item()
    assert dropped == pytest.approx(rate, abs=0.005)
    kept = weights[weights > 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / T / (1 - rate)))


GROWN = """
import torch
import annotated_transformer as book

def products(some):
    for rows in some:
        x, weight = torch.ones(rows, 128), torch.ones(256, 128)
        book.HalfProduct.apply(x, weight, None)
        book.onednn_product(x, weight)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

book.fast(book.tiny_model(), half=True)
before = products(range(1, 100))
print(products(range(100, 400)) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux")
def test_products_of_many_sizes_are_not_all_remembered():
    """With what the libraries keep by default it was a megabyte for each."""
    done = subprocess.run(
        [sys.executable, "-c", GROWN], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1e8


# That is torch's own way to trace a function with a backward pass.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@pytest.mark.parametrize("half", [False, True])
def test_what_torch_compiles_has_the_same_gradient(half, monkeypatch):
    """All but the last step, which needs a compiler of C++ or a GPU.

    One layer on each side has sublayers of every kind; more take longer.
    """
    traced = partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(book.fast(book.tiny_model(N=1), half=half).train())
    gradients = [
        partial(book.backward_in_slices, half=half),
        book.compiled_gradient(models[1], half=half),
    ]
    batches = 1 if half else 2  # the second has other sizes
    for batch in itertools.islice(some_batches(), batches):
        found = []
        for model, gradient in zip(models, gradients):
            model.zero_grad()
            loss = gradient(model, batch, 17, 0.1)
            found.append((loss, [w.grad for w in model.parameters()]))
        close = dict(rtol=1e-2, atol=1e-3) if half else {}
        torch.testing.assert_close(found[1][0], found[0][0], **close)
        for one, other in zip(found[0][1], found[1][1]):
            torch.testing.assert_close(other, one, **close)
    torch._dynamo.reset()


def test_a_fast_model_in_use_keeps_its_attention_weights_for_the_charts():
    model = book.fast(book.tiny_model()).eval()
    batch = next(some_batches())
    model(batch.src, batch.read)
    weights = model.decoder.layers[0].cross_attention.weights
    assert weights.shape[-1] == batch.src.size(1)


def test_every_form_of_the_chart_trains(monkeypatch):
    """Each form is measured, on this processor with 16 bits too."""
    sizes = dict(N=1, d_model=16, d_ff=16, h=2, dropout=0.1)
    monkeypatch.setitem(book.PRESETS, "tiny", sizes)
    monkeypatch.setattr(book, "half_pays", lambda *_: True)
    monkeypatch.setattr(book, "onednn_pays", lambda device: True)
    rates = book.speeds(vocab=50, turns=1)
    assert list(rates) == list(book.FORMS)
    assert all(rate > 0 for rate in rates.values())
    monkeypatch.setattr(book, "half_pays", lambda *_: False)
    models, train = [], book.training

    def watched(model, *how, **more):
        models.append(model)
        return train(model, *how, **more)

    monkeypatch.setattr(book, "training", watched)
    assert "16-bit products" not in book.speeds(vocab=50, turns=1)
    kinds = {type(part) for model in models for part in model.modules()}
    assert len(models) == len(book.FORMS) - 1
    assert kinds.isdisjoint(book.HALF.values())


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5, 0.9])
def test_byte_dropout_has_its_rate_at_each_of_the_eight_bytes(p):
    x = torch.ones(80_000, dtype=torch.double)
    y = book.ByteDropout(p)(x).view(-1, 8)
    exact = round(256 * p) / 256
    assert abs(exact - p) <= 1 / 512
    dropped = (y == 0).double().mean(0)  # for each place in a draw
    assert (dropped - exact).abs().max() < 5 * (exact / 10_000) ** 0.5
    kept = torch.tensor(1 / (1 - exact), dtype=torch.double)
    torch.testing.assert_close(y[y != 0].unique(), kept[None])


def test_byte_dropout_of_neighbours_is_independent():
    y = book.ByteDropout(0.5)(torch.ones(160_000)).view(-1, 16) - 1
    together = y.T @ y / len(y)  # 1 on the diagonal
    torch.testing.assert_close(together, torch.eye(16), atol=0.05, rtol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_of_the_loss_is_that_of_autograd(smoothing):
    """At the states and at the words' matrix; slices of any size."""
    states = torch.randn(23, 8, dtype=torch.double, requires_grad=True)
    weight = torch.randn(11, 8, dtype=torch.double, requires_grad=True)
    labels = torch.randint(1, 11, (23,))
    loss = book.smoothed_loss(states @ weight.T, labels, smoothing)
    expected = torch.autograd.grad(loss / 7, (states, weight))
    for rows in (1, 5, 23, 100):
        with torch.no_grad():
            total, *found = book.loss_and_gradients(
                states, labels, weight, 7, smoothing, rows
            )
        torch.testing.assert_close(total, loss.detach())
        torch.testing.assert_close(found, list(expected))


def test_half_products_learn_as_plain_ones_do():
    """Twenty updates in 16 bits end near those in 32, and not on them."""
    ends = []
    for half in (False, True):
        torch.manual_seed(0)
        model = book.tiny_model()
        book.fast(model, half)
        pairs = [([5, 6, 7, EOS], [BOS, 7, 6, 5, EOS])] * 20
        recipe = book.Recipe(steps=20, warmup=10, batch_tokens=40,
                             max_tokens=40)  # fmt: skip
        updates = book.training(
            model, book.stream(pairs, 40), recipe,
            gradient=partial(book.backward_in_slices, half=half),
        )  # fmt: skip
        ends.append([u.loss for u in updates])
    assert ends[0] != ends[1]
    assert ends[0] == pytest.approx(ends[1], rel=0.05)
    assert ends[1][-1] < 0.8 * ends[1][0]


@pytest.mark.parametrize("rows", [1, 5, None])
@pytest.mark.parametrize("norm_first", [False, True])
def test_products_by_onednn_learn_as_torchs_own(norm_first, rows, monkeypatch):
    """In 32 bits: gradients, twenty updates, and that oneDNN is asked."""
    asked, product = Counter(), book.onednn_product

    def watched(x, weight, bias=None):
        asked[x.dtype, tuple(weight.shape)] += 1
        return product(x, weight, bias)

    monkeypatch.setattr(book, "onednn_product", watched)
    ends = []
    for onednn in (False, True):
        torch.manual_seed(0)
        model = book.fast(
            book.tiny_model(norm_first=norm_first), False, onednn
        )
        gradient = partial(book.backward_in_slices, rows=rows, onednn=onednn)
        assert not asked
        gradient(model, next(some_batches()), 17, 0.1)
        gradients = [w.grad.clone() for w in model.parameters()]
        recipe = book.Recipe(steps=20, warmup=20, batch_tokens=99,
                             max_tokens=99)  # fmt: skip
        batches = itertools.cycle(some_batches())
        updates = book.training(model, batches, recipe, gradient=gradient)
        losses = [update.loss for update in updates]
        ends.append((gradients, losses, [*model.parameters()]))
    one, other = ends
    torch.testing.assert_close(other[0], one[0], rtol=1e-4, atol=1e-5)
    assert other[1] == pytest.approx(one[1], rel=1e-3)
    torch.testing.assert_close(other[2], one[2], rtol=1e-2, atol=1e-3)
    assert {kind for kind, _ in asked} == {torch.float}
    config = model.config  # of the loss, and of queries, keys and values
    D, V = config.d_model, config.tgt_vocab
    assert {(V, D), (3 * D, D), (config.d_ff, D)} <= {s for _, s in asked}


@pytest.fixture
def asked_anew():
    """Whether oneDNN answers is asked anew in a test, and after it."""
    yield
    book.onednn_answers.cache_clear()


def test_without_onednn_its_products_are_torchs_own(
    monkeypatch, capsys, asked_anew
):
    x, weight = torch.randn(5, 3), torch.randn(4, 3)
    expected = torch.nn.functional.linear(x, weight)
    torch.testing.assert_close(book.onednn_product(x, weight), expected)
    book.onednn_answers.cache_clear()
    monkeypatch.setattr(book.torch.ops, "mkldnn", object())
    assert not book.onednn_answers()
    assert book.onednn_product(x, weight).equal(expected)
    assert not book.onednn_pays(torch.device("cpu"))
    assert [*book.product_seconds(torch.device("cpu"), 1)] == [
        "32 bits", "16 bits"
    ]  # fmt: skip
    book.EXAMPLES["two_libraries"]()
    assert "oneDNN" not in capsys.readouterr().out


def test_onednn_sums_nothing_to_zero():
    """A process without labels in its part has no rows (see `share`)."""
    x, weight = torch.randn(4, 0), torch.randn(3, 0)
    assert book.onednn_product(x, weight).equal(torch.zeros(4, 3))
    assert book.onednn_product(x.T, torch.randn(3, 4)).shape == (0, 3)
    model = book.fast(book.tiny_model(), onednn=True)
    empty = book.Batch(torch.full((2, 3), PAD), torch.full((2, 4), PAD))
    gradient = partial(book.backward_in_slices, onednn=True)
    assert gradient(model, empty, 7, 0.1) == 0
    assert not any(weight.grad.any() for weight in model.parameters())


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64")
    or not torch.backends.mkldnn.is_available(),
    reason="PyTorch comes with oneDNN on other processors",
)
def test_onednn_answers_where_pytorch_has_it():
    """Its name is not one of those that PyTorch promises to keep."""
    assert book.onednn_answers()


@pytest.mark.parametrize(
    "seconds, onednn, half",
    [((1, 0.5, 0.4), True, True), ((1, 0.5, 0.46), True, False),
     ((1, 0.8, 0.5), False, True), ((1, 1, 1), False, False)],
)  # fmt: skip
def test_products_pay_where_they_are_clearly_faster(
    seconds, onednn, half, monkeypatch
):
    names = "32 bits", "oneDNN", "16 bits"
    found = dict(zip(names, seconds))
    monkeypatch.setattr(book, "product_seconds", lambda *_: dict(found))
    monkeypatch.setattr(book, "onednn_answers", lambda: True)
    cpu = torch.device("cpu")
    assert (book.onednn_pays(cpu), book.half_pays(cpu)) == (onednn, half)
    assert not book.onednn_pays(torch.device("cuda"))
    assert not book.half_pays(torch.device("mps"))


def test_the_switch_keeps_the_weights_and_their_names():
    model = book.tiny_model()
    before = model.state_dict()
    book.fast(model, onednn=True)
    assert any(type(m) is book.OneDnnLinear for m in model.modules())
    book.fast(model, half=True)
    assert not any(type(m) is book.OneDnnLinear for m in model.modules())
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name] is not None for name in after)
    assert all(before[n].data_ptr() == after[n].data_ptr() for n in after)


def test_the_pages_that_the_system_hands_out_are_counted():
    """Where the system counts them at all, it does so for our probe.

    No number is demanded: it may join pages, count them late, take them away
    and hand them out again; and in some sandboxes it counts none. Nor may the
    memory be a tensor's: the C library can have kept 128 MiB of earlier tests.
    `test_the_pages_are_those_of_the_work` has a number, of a system made up.
    """
    import resource

    def ask():
        with mmap.mmap(-1, 2**27) as memory:
            for place in range(0, 2**27, mmap.PAGESIZE):
                memory[place] = 1

    def counted(work):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt > before

    counts = all(counted(ask) for _ in range(5))
    pages = [book.new_pages(book.use_new_memory) for _ in range(5)]
    assert min(pages) >= 0
    if counts:
        assert any(pages)


def test_memory_that_was_kept_does_not_hide_that_pages_are_counted(
    monkeypatch, capsys
):
    """An update that needs no new page is told as such: 0."""
    import resource

    asked = 0

    def counting(*arguments, new=mmap.mmap):
        nonlocal asked
        asked += 1
        return new(*arguments)

    monkeypatch.setattr(mmap, "mmap", counting)
    monkeypatch.setattr(
        resource, "getrusage", lambda who: SimpleNamespace(ru_minflt=asked)
    )
    book.EXAMPLES["memory_of_an_update"]()
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == ["0", "0"]


def test_the_roofline_counts_operations_and_bytes(monkeypatch):
    """Two matrices of 2²⁰ numbers, and each pass over them takes 2 s."""
    passes = []

    def two_seconds(work, tries=5):
        passes.append(set())
        work()
        return 2

    def watched(product, x, plus=None):
        passes[-1].add(product)

    monkeypatch.setattr(book, "best_seconds", two_seconds)
    monkeypatch.setattr(book.Product, "__call__", watched)
    rates, read = book.rates_by_rows([1, 3], matrices=2)
    assert read == 4 * 2**20
    assert len(rates) == 2
    for values in rates.values():
        assert values == [2 * 2**20, 3 * 2 * 2**20]
    assert [*map(len, passes)] == [0, 1, 1, 2, 2]


def test_the_pages_are_those_of_the_work(monkeypatch):
    import resource

    handed_out = 1000

    def usage(who):
        assert who == resource.RUSAGE_SELF
        return SimpleNamespace(ru_minflt=handed_out)

    def work():
        nonlocal handed_out
        handed_out += 7

    monkeypatch.setattr(resource, "getrusage", usage)
    assert book.new_pages(work) == 7


@pytest.mark.parametrize("system", ["windows", "a sandbox"])
def test_where_pages_are_not_counted_the_book_says_so(
    system, monkeypatch, capsys
):
    if system == "windows":
        monkeypatch.setattr(book.sys, "platform", "win32")
    else:
        import resource

        usage = SimpleNamespace(ru_minflt=0)
        monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    book.EXAMPLES["memory_of_an_update"]()
    assert "does not count" in capsys.readouterr().out


# ------------------------------------------------------------ recorded updates


@pytest.fixture
def a_run(one_thread):
    """A function that makes a small Run, and its PackedPairs."""
    pairs = [(pair.de, pair.en) for pair in book.toy_corpus()["train"][:300]]

    def make(eps=1e-9):
        torch.manual_seed(0)
        sizes = dict(N=1, d_model=16, d_ff=32, h=2, dropout=0.0)
        translator = book.untrained_translator(
            pairs, ("de", "en"), sizes, pieces=300
        )
        model = book.fast(translator.model)
        moving, facts = (
            book.MovingAverage(model, 0.99),
            {"recipe": {"seed": 0}},
        )
        run = book.Run(translator, book.adam(model), moving, facts)
        run.optimizer.param_groups[0]["eps"] = eps
        return run, book.pack(translator, pairs)

    return make


RECORDED = book.Recipe(
    steps=50, warmup=40, factor=0.1, batch_tokens=600, max_tokens=600, ema=0.99
)


def by_recorded_updates(run, pairs, every=30, stop=50, recipe=RECORDED):
    """Train to update `stop`; the Updates on the way."""
    updates = book.RecordedUpdates(
        run, pairs, recipe, book.backward_in_slices, every,
        torch.device("cpu"),
    )  # fmt: skip
    told = []
    for update in updates:
        told.append(update)
        run.step = update.step
        if update.step == stop:
            break
    return told


def ends(run):
    """Weights and their moving averages."""
    return [*run.model.state_dict().values(), *run.moving.weights]


@pytest.mark.parametrize("clip", [None, 0.5])
def test_recorded_updates_are_those_of_training(a_run, clip):
    """The same batches, rates, moving average and losses.

    With an ε that makes little of the last digit of what is nearly 0.
    """
    recipe = book.replace(RECORDED, clip=clip)
    run, pairs = a_run(eps=1e-5)
    plain = []
    for update in book.training(
        run.model, book.stream(pairs, 600, 0), recipe, run.optimizer,
        gradient=book.backward_in_slices,
    ):  # fmt: skip
        run.moving.update(run.model, update.step)
        plain.append(update)
    expected, (run, pairs) = ends(run), a_run(eps=1e-5)
    told = by_recorded_updates(run, pairs, recipe=recipe)
    assert [update.step for update in told] == [20, 30, 40, 50]
    for before, update in zip([0, 20, 30, 40], told):
        few = plain[before : update.step]
        mean = sum(one.loss for one in few) / len(few)
        assert update.loss == pytest.approx(mean, rel=1e-5)
        assert update.tokens == sum(one.tokens for one in few)
        assert update.rate == pytest.approx(few[-1].rate)
    torch.testing.assert_close(ends(run), expected, rtol=1e-3, atol=1e-4)


def test_what_is_recorded_keeps_the_positions_that_it_reads(a_run):
    """A validation may grow the table; the old one must not be freed."""
    run, pairs = a_run()
    updates = book.RecordedUpdates(
        run, pairs, RECORDED, book.backward_in_slices, 30, torch.device("cpu")
    )
    next(iter(updates))
    read = weakref.ref(run.model.position.table)
    for longer in (300, 900):
        width = run.model.config.d_model
        run.model.position(torch.zeros(1, longer, width))
        gc.collect()
        assert len(run.model.position.table) >= longer
        assert read() is not None


def test_recording_leaves_the_run_as_it_is(a_run, monkeypatch):
    """On a GPU the work is done once before it is recorded."""
    run, pairs = a_run()
    by_recorded_updates(run, pairs)
    expected = ends(run)

    def as_a_gpu_does(work, device, pool=None):
        work()
        torch.rand(3)  # dropout draws
        return work, None

    monkeypatch.setattr(book, "as_graph", as_a_gpu_does)
    torch.manual_seed(5)
    wanted = torch.rand(1)
    run, pairs = a_run()
    torch.manual_seed(5)
    by_recorded_updates(run, pairs)
    torch.testing.assert_close(ends(run), expected, rtol=0, atol=0)
    assert torch.rand(1) == wanted


def test_recorded_updates_go_on_from_a_checkpoint(a_run, tmp_path):
    run, pairs = a_run()
    by_recorded_updates(run, pairs)
    expected, (run, pairs) = ends(run), a_run()
    by_recorded_updates(run, pairs, stop=30)
    run.save(tmp_path)
    run, pairs = a_run()
    run.load(tmp_path)
    assert run.step == 30
    by_recorded_updates(run, pairs)
    torch.testing.assert_close(ends(run), expected, rtol=0, atol=0)


class Reached(Exception):
    """What was changed is used."""


def two_updates(monkeypatch):
    """Let the trainings that the book keeps end after two updates."""
    recipe = replace(book.COPY_RECIPE, steps=2)
    monkeypatch.setattr(book, "COPY_RECIPE", recipe)
    monkeypatch.setitem(book.TOY_RECIPE, "steps", 2)


@pytest.mark.parametrize("name", ["smoothed_loss", "Cache.read"])
def test_a_change_reaches_the_small_trainings_not_the_quicker_forms(
    name, monkeypatch
):
    """As *Start here* says to those who edit."""

    def changed(*args, **how):
        raise Reached

    monkeypatch.setattr(f"annotated_transformer.{name}", changed)
    two_updates(monkeypatch)
    translator, losses = book.toy_translator.__wrapped__()
    assert len(losses) == 2 and translator.translate(["der Hund schläft ."])
    with pytest.raises(Reached):
        book.train_copy()
    with pytest.raises(Reached):
        model, _ = book.train_small(recipe=replace(book.SMALL_RECIPE, steps=2))
        book.measure_small(model, book.greedy)


def test_with_another_attention_the_quicker_forms_refuse_to_write(monkeypatch):
    """Their training does not ask it, so it would go unnoticed."""
    right = book.attention

    def unscaled(Q, K, V, mask=None, drop=None):
        return right(Q * Q.size(-1) ** 0.5, K, V, mask, drop)

    two_updates(monkeypatch)
    _, expected, _ = book.train_copy()
    translator, _ = book.toy_translator.__wrapped__()
    monkeypatch.setattr(book, "attention", unscaled)
    with pytest.raises(book.InputError, match="was changed in this model"):
        translator.translate(["der Hund schläft ."])
    monkeypatch.setattr(book, "training", None)  # for it is not begun
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.toy_translator.__wrapped__()
    monkeypatch.undo()
    two_updates(monkeypatch)
    monkeypatch.setattr(book, "attention", unscaled)
    _, losses, _ = book.train_copy()
    assert len(losses) == 2 and losses != expected  # the plain form asks it
    model, _ = book.train_small(recipe=replace(book.SMALL_RECIPE, steps=2))
    book.measure_small(model, book.greedy)


class Gelu(book.FeedForward):
    def forward(self, x):
        return self.W_2(torch.nn.functional.gelu(self.W_1(x)))


class Louder(book.Residual):
    def forward(self, x, sublayer):
        return 2 * super().forward(x, sublayer)


class AndBias(book.Embedding):
    def logits(self, x):
        return super().logits(x) + torch.arange(float(len(self.weight)))


class Turning(book.MultiHeadAttention):
    """Its formula is its own, its matrices are where they were."""

    def forward(self, query, key, value, mask=None):
        return super().forward(2 * query, key, value, mask)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("part", [Gelu, Louder, AndBias, Turning])
def test_a_writer_refuses_what_it_would_leave_out(part, norm_first):
    model = book.tiny_model(norm_first=norm_first)
    book.Writer(model)
    book.exchange(model, {part.__mro__[1]: part})
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model)


class Slightly(book.FeedForward):
    def forward(self, x):
        return 1.01 * super().forward(x)


def test_a_writer_refuses_what_changes_little():
    """As a network of another activation does in a small model."""
    model = book.tiny_model()
    book.exchange(model, {book.FeedForward: Slightly})
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model)


class Window(book.Transformer):
    """Each new word looks back at nine places only."""

    def decode(self, tgt, memory, src_mask):
        places = torch.arange(tgt.size(1))
        near = places[:, None] - places < 9
        y = self.position(self.tgt_embedding(tgt))
        mask = book.target_mask(tgt) & near
        return self.decoder(y, memory, src_mask, mask)


@pytest.mark.parametrize("seed", range(3))
def test_a_writer_refuses_what_only_longer_texts_show(seed):
    torch.manual_seed(seed)
    model = book.tiny_model()
    book.exchange(model, {book.Transformer: Window})
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model)


class Gated(torch.nn.Module):
    """A feed-forward network whose maps have other names."""

    def __init__(self, config):
        super().__init__()
        D, F = config.d_model, config.d_ff
        self.gate, self.up = torch.nn.Linear(D, F), torch.nn.Linear(D, F)
        self.down = torch.nn.Linear(F, D)

    def forward(self, x):
        return self.down(self.gate(x).sigmoid() * self.up(x))


def test_a_writer_refuses_parts_that_it_does_not_know():
    for change in (
        {"feed_forward": Gated(book.tiny_model().config)},
        {"self_attention": torch.nn.Identity()},
    ):
        model = book.tiny_model()
        for name, part in change.items():
            setattr(model.encoder.layers[0], name, part)
        with pytest.raises(book.InputError, match="was changed in this model"):
            book.Writer(model)
    model.position = torch.nn.Identity()
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model)


class Banning(book.Embedding):
    def logits(self, states):
        word = torch.tensor([5])
        return super().logits(states).index_fill(-1, word, -float("inf"))


def test_a_writer_refuses_a_word_that_may_not_be_written(tmp_path):
    vocab = words_of(*"abcdefgh")
    translator = book.new_translator((vocab, vocab), ("de", "en"), SIZES)
    book.exchange(translator.model, {book.Embedding: Banning})
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(translator.model)
    with pytest.warns(UserWarning, match="parts of this model are your own"):
        book.save_translator(translator, tmp_path)


class FewPlaces(torch.nn.Module):
    def __init__(self, places, width):
        super().__init__()
        self.table = torch.nn.Embedding(places, width)

    def forward(self, x, start=0):
        return x + self.table(torch.arange(start, start + x.size(1)))


def test_a_writer_refuses_a_model_of_few_places():
    model = book.tiny_model()
    model.position = FewPlaces(20, 32)
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_writer_takes_weights_in_16_bits(kind):
    """Whose rounding grows with the layers; with some seeds it was refused."""
    for seed in range(5):
        torch.manual_seed(seed)
        config = book.Config(500, 500, d_model=64, d_ff=128, h=4)
        book.Writer(book.Transformer(config).eval().to(kind))
        book.Writer(book.restless_model(N=6).to(kind))


@pytest.mark.parametrize(
    "kind, limit",
    [(None, 0.002), (torch.float32, 0.002), (torch.bfloat16, 0.03)],
)
def test_only_fewer_bits_excuse_a_difference(kind, limit, monkeypatch):
    """32 bits that are asked for by name are still 32."""
    model = book.tiny_model()
    monkeypatch.setattr(book, "written_otherwise", lambda *_: 0.9 * limit)
    book.Writer(model, kind)
    monkeypatch.setattr(book, "written_otherwise", lambda *_: 1.1 * limit)
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model, kind)


@pytest.mark.parametrize("preset", ["tiny", "base"])
@pytest.mark.parametrize("kind", [None, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_writer_takes_what_is_only_rounded(preset, kind, norm_first):
    torch.manual_seed(0)
    config = book.Config(
        900, 900, norm_first=norm_first, **book.PRESETS[preset]
    )
    model = book.Transformer(config)
    far = book.written_otherwise(model, book.Writer(model, kind).begin)
    assert far < (0.01 if kind else 1e-4)


class Adapted(torch.nn.Linear):
    """A map with an adapter: weights beside its matrix."""

    def __init__(self, *sizes):
        super().__init__(*sizes, bias=False)
        self.beside = torch.nn.Parameter(torch.ones(self.out_features))

    def forward(self, x):
        return super().forward(x) * self.beside


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "new", [Adapted, torch.nn.Linear], ids=["adapter", "bias"]
)
def test_fast_leaves_maps_that_are_more_than_a_matrix_as_they_are(new, half):
    model = book.tiny_model()
    attention = model.encoder.layers[0].self_attention
    D = model.config.d_model
    attention.W_Q = new(D, D)
    book.fast(model, half)
    assert type(attention) is book.MultiHeadAttention
    others = model.encoder.layers[1].self_attention
    assert type(others) is book.FusedAttention
    batch = next(some_batches())
    book.backward_in_slices(model, batch, batch.count(), 0.1)
    for name, weight in attention.W_Q.named_parameters():
        assert weight.grad is not None and weight.grad.any(), name


class Silent(book.Dropout):
    """It drops all in training."""

    def forward(self, x):
        return 0 * x if self.training else x


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("own", ["dropout", "hook", "pruning"])
def test_fast_leaves_an_attention_with_more_of_ones_own(own, half):
    """In texts of 30 places torch's function would not ask its dropout."""
    config = replace(book.tiny_model().config, attention_dropout=0.1)
    model = book.Transformer(replace(config, dropout=0.0)).train()
    attention = model.encoder.layers[0].self_attention
    network = model.encoder.layers[0].feed_forward
    for part in model.modules():
        if isinstance(part, book.MultiHeadAttention):
            part.drop = Silent(0.1) if part is attention else Silent(0.0)
    if own == "hook":
        for part in (attention.W_Q, network.W_1):
            part.register_forward_hook(lambda part, x, y: 0 * y)
    if own == "pruning":
        prune.l1_unstructured(attention.W_Q, "weight", 0.5)
    if own != "dropout":
        attention.drop.__class__, attention.drop.p = book.Dropout, 0.0
    src, tgt = torch.randint(4, 14, (2, 2, 30))
    expected = model(src, tgt)
    book.fast(model, half).train()
    assert type(attention) is book.MultiHeadAttention
    found = model(src, tgt)
    limit = 0.02 if half else 1e-5
    assert (found - expected).norm() < limit * expected.norm()
    for _ in range(2):  # a pruned weight is made anew each time
        batch = book.Batch(src, tgt)
        book.backward_in_slices(model, batch, batch.count(), 0.1, half=half)


class Doubling(torch.nn.Linear):
    """A map that is more than its matrix and its bias."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "new", [Doubling, partial(torch.nn.Linear, bias=False)]
)
def test_fast_leaves_feed_forward_networks_of_other_maps(new):
    """In 16 bits only the book's own is computed in one go."""
    model = book.tiny_model(dropout=0.0)
    network = model.encoder.layers[0].feed_forward
    network.W_1 = new(model.config.d_model, model.config.d_ff)
    batch = next(some_batches())
    expected = model(batch.src, batch.read)
    book.fast(model, half=True).train()
    assert type(network) is book.FeedForward
    others = model.encoder.layers[1].feed_forward
    assert type(others) is book.HalfFeedForward
    found = model(batch.src, batch.read)
    assert (found - expected).norm() < 0.02 * expected.norm()


def biased(model):
    """Give a layer's queries, keys and values biases."""
    D, attention = model.config.d_model, model.decoder.layers[0].self_attention
    for name in ("W_Q", "W_K", "W_V"):
        setattr(attention, name, torch.nn.Linear(D, D))
    return model


@pytest.mark.parametrize("change", [biased, lambda m: book.narrow(m, 2)])
def test_a_writer_refuses_matrices_of_other_shapes(change):
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(change(book.tiny_model()))


def test_a_copy_of_a_compiled_model_has_weights_of_its_own(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    model = book.fast(book.tiny_model())
    book.compiled_gradient(model)
    twin, batch = copy.deepcopy(model), next(some_batches())
    for mode in (True, False):
        before = model.train(mode).states(batch.src, batch.read)
        with torch.no_grad():
            for weight in twin.train(mode).parameters():
                weight.zero_()
        assert not twin.states(batch.src, batch.read).equal(before)
        assert model.states(batch.src, batch.read).equal(before)


def words_of(*vocab):
    return book.Vocabulary([*book.SPECIALS, *vocab])


def test_what_the_readme_builds_on_runs(monkeypatch):
    """Its Python runs as it stands, and a Translator of one's own writes."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = {}
    for block in re.findall(r"(?ms)^```python\n(.*?)^```\n", text):
        exec(block, names)
    vocab = words_of(*"abcdefgh")
    plain = book.new_translator((vocab, vocab), ("de", "en"), SIZES)
    model = book.exchange(plain.model, {book.FeedForward: names["Gelu"]})
    ours = names["OurTranslator"](model, (vocab, vocab), ("de", "en"))
    sources = [["a", "b", "c"], ["h"], ["d", "d"]]
    found = ours.search(sources, book.greedy)
    src = book.pad([vocab.encode(words) for words in sources])
    assert found == book.greedy_plain(model, src)
    with pytest.raises(book.InputError, match="was changed in this model"):
        plain.search(sources, book.greedy)


class Quieter(book.Embedding):
    def forward(self, tokens):
        return super().forward(tokens) / 2


class OtherNorm(torch.nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) * 2


def exchange_norms(model):
    book.exchange(model, {torch.nn.LayerNorm: OtherNorm})


def halve_positions(model):
    model.position.table = model.position.table / 2


def deepen(model):
    c = replace(model.config, N=3)
    model.encoder = book.Stack(book.EncoderLayer, c)


class Broken(book.FeedForward):
    def forward(self, x):
        return self.lost(x)


OWN = {
    "broken": lambda model: book.exchange(model, {book.FeedForward: Broken}),
    "network": lambda model: book.exchange(model, {book.FeedForward: Gelu}),
    "embedding": lambda model: book.exchange(model, {book.Embedding: Quieter}),
    "norms": exchange_norms,
    "positions": halve_positions,
    "depth": deepen,
}


@pytest.mark.parametrize("own", OWN.values(), ids=[*OWN])
def test_saving_a_model_with_parts_of_its_own_warns(tmp_path, recwarn, own):
    vocab = words_of("a", "b")
    translator = book.new_translator((vocab, vocab), ("de", "en"), SIZES)
    before = torch.get_rng_state()
    book.save_translator(translator, tmp_path)
    assert not recwarn.list and before.equal(torch.get_rng_state())
    own(translator.model)
    with pytest.warns(UserWarning, match="parts of this model are your own"):
        book.save_translator(translator, tmp_path)


def test_of_a_compiled_model_that_inside_is_saved(tmp_path, recwarn):
    vocab = words_of("a", "b")
    translator = book.new_translator((vocab, vocab), ("de", "en"), SIZES)
    weights = translator.model.state_dict()
    translator.model = torch.compile(translator.model)  # at its first call
    book.save_translator(translator, tmp_path)
    assert not [w for w in recwarn if "your own" in str(w.message)]
    again = book.load_translator(tmp_path).model.state_dict()
    assert again.keys() == weights.keys()


# ------------------------------------------ hooks, derivatives, and the like


@pytest.mark.parametrize(
    "gradient", [book.backward_in_slices, book.backward_r_drop]
)
def test_hooks_see_the_whole_gradient_of_the_words(gradient):
    """Rows that a hook keeps as they are stay so."""
    model, [batch, *_] = book.tiny_model(), some_batches()
    weight, seen = model.tgt_embedding.weight, []
    gradient(model, batch, 1, 0.1)
    whole, weight.grad = weight.grad, None
    mask = (torch.arange(len(weight)) > 8)[:, None]
    weight.register_hook(lambda g: (seen.append(g.clone()), g * mask)[1])
    gradient(model, batch, 1, 0.1)
    torch.testing.assert_close(seen, [whole])
    torch.testing.assert_close(weight.grad, whole * mask)


class LowRank(torch.nn.Module):
    """Adds a product of two narrow matrices, which alone learn."""

    def __init__(self, V, D):
        super().__init__()
        self.A = torch.nn.Parameter(torch.randn(V, 2))
        self.B = torch.nn.Parameter(torch.randn(2, D))

    def forward(self, weight):
        return weight.detach() + self.A @ self.B


def test_words_made_of_other_weights_learn_as_in_the_plain_form():
    model, [batch, *_] = book.tiny_model(), some_batches()
    embedding = model.tgt_embedding
    added = LowRank(*embedding.weight.shape)
    parametrize.register_parametrization(embedding, "weight", added)
    found = []
    for gradient in (book.backward, book.backward_in_slices):
        model.zero_grad()
        gradient(model, batch, batch.count(), 0.1)
        found.append([added.A.grad.clone(), added.B.grad.clone()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options", [dict(onednn=True), dict(half=True)], ids=["oneDNN", "half"]
)
def test_second_derivatives_are_refused_where_they_would_be_wrong(options):
    model, [batch, *_] = (
        book.fast(book.tiny_model(), **options),
        some_batches(),
    )
    y = model.train().states(batch.src, batch.read).square().sum()
    weights = [*model.parameters()]
    assert all(g.isfinite().all() for g in torch.autograd.grad(
        y, weights, retain_graph=True
    ))  # fmt: skip
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(y, weights, create_graph=True)


def forward_of_its_own(linear, seen):
    usual = linear.forward
    linear.forward = lambda x: seen.append(1) or usual(x)


@pytest.mark.parametrize(
    "watch",
    [
        lambda linear, seen: linear.register_full_backward_hook(
            lambda *_: seen.append(1)
        ),
        lambda linear, seen: linear.register_full_backward_pre_hook(
            lambda *_: seen.append(1)
        ),
        forward_of_its_own,
    ],
    ids=["backward", "before backward", "forward"],
)
@pytest.mark.parametrize("half", [False, True])
def test_fast_calls_what_watches_a_map(watch, half):
    model, [batch, *_], seen = book.tiny_model(), some_batches(), []
    layer = model.encoder.layers[0]
    watch(layer.self_attention.W_Q, seen)
    watch(layer.feed_forward.W_1, seen)
    book.fast(model, half=half).train()
    book.backward(model, batch, batch.count(), 0.1)
    assert len(seen) == 2


@pytest.mark.parametrize("short", [0, 24])
def test_fast_attention_drops_nothing_if_its_dropout_is_told_so(short):
    config = book.Config(10, 10, **SIZES, attention_dropout=0.5)
    attention = book.FusedAttention(config).train()
    attention.short = short
    attention.drop.eval()
    x = torch.randn(2, 5, 16)
    assert attention(x, x, x).equal(attention(x, x, x))


def test_a_writer_is_made_under_autocast():
    vocab = words_of("a", "b")
    translator = book.new_translator((vocab, vocab), ("de", "en"), SIZES)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(translator.translate(["a b", "b"])) == 2
