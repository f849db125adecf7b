"""On a GPU, where there is one: the same model, the same words."""

from functools import partial
from pathlib import Path

import kernel_cases
import pytest
import torch

import annotated_transformer as book
from annotated_transformer import BOS, EOS

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU"
)


@pytest.fixture(autouse=True)
def products_in_full():
    """Use all 32 bits of a float32, whatever the environment says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def a_batch(lengths=(9, 3, 17, 1)):
    """Pairs of unlike lengths, on the GPU."""
    rows = [torch.randint(4, 14, (n,)).tolist() for n in lengths]
    src = book.pad([[*row, EOS] for row in rows])
    tgt = book.pad([[BOS, *row, EOS] for row in rows])
    return book.Batch(src, tgt).to("cuda")


def a_model(**changes):
    """A small model on the GPU, its heads as wide as base's."""
    torch.manual_seed(0)
    return book.tiny_model(d_model=128, h=2, **changes).to("cuda").train()


def gradients(model, batch, gradient):
    """The loss, and each weight's gradient."""
    model.zero_grad()
    loss = gradient(model, batch, batch.count(), 0.1)
    return [loss.float(), *(weight.grad for weight in model.parameters())]


@pytest.mark.parametrize("norm_first", [False, True])
def test_logits_are_those_of_the_processor(norm_first):
    model, batch = a_model(norm_first=norm_first).eval(), a_batch()
    with torch.no_grad():
        there = model(batch.src, batch.read).cpu()
        here = model.cpu()(*(x.cpu() for x in (batch.src, batch.read)))
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_first", [False, True])
def test_fast_form_gives_the_plain_gradients(norm_first):
    model, batch = a_model(norm_first=norm_first), a_batch()
    plain = gradients(model, batch, book.backward)
    in_slices = partial(book.backward_in_slices, rows=7)
    fast = gradients(book.fast(model), batch, in_slices)
    for one, two in zip(plain, fast):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


needs_kernels = pytest.mark.skipif(
    not (
        torch.cuda.is_available() and book.kernels_run(torch.device("cuda:0"))
    ),
    reason="our kernels do not run on this GPU",
)


@needs_kernels
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("sizes", kernel_cases.SIZES)
def test_the_kernel_computes_what_the_formula_does(sizes, own_rows):
    kernel_cases.check_case(sizes, own_rows, "cuda", torch.bfloat16, 0.01)


@needs_kernels
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU or none")
def test_the_kernel_runs_where_its_tensors_are():
    sizes = kernel_cases.SIZES[4]
    kernel_cases.check_case(sizes, False, "cuda:1", torch.bfloat16, 0.01)


@needs_kernels
@pytest.mark.filterwarnings("ignore")  # those of torch.compile itself
def test_the_kernel_is_an_operation_for_torch():
    kernel_cases.check_operation("cuda", torch.bfloat16)
    sizes = kernel_cases.SIZES[4]
    kernel_cases.check_case(sizes, True, "cuda", torch.bfloat16, 0.01, True)


@needs_kernels
def test_in_sixteen_bits_short_texts_use_the_kernel(monkeypatch):
    """And the gradients are those of torch's own attention, but rounded."""
    model, batch, calls = book.fast(a_model(), half=True), a_batch(), []
    gradient = partial(book.backward_in_slices, half=True)
    kernel = book.short_attention
    monkeypatch.setattr(
        book, "short_attention", lambda *x: calls.append(x) or kernel(*x)
    )
    ours = joined(gradients(model, batch, gradient)[1:])
    assert len(calls) == 3 * model.config.N
    monkeypatch.setattr(book.FusedAttention, "has_kernel", lambda *x: False)
    theirs = joined(gradients(model, batch, gradient)[1:])
    assert len(calls) == 3 * model.config.N
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


@pytest.mark.filterwarnings("ignore")  # those of torch.compile itself
@pytest.mark.parametrize("half", [False, True])
def test_the_states_are_compiled_in_one_piece(half):
    model, batch = book.fast(a_model(), half), a_batch()
    found = torch._dynamo.explain(model.states)(batch.src, batch.read)
    assert found.graph_count == 1, found.break_reasons


def joined(found):
    """All numbers of some tensors, in one."""
    return torch.cat([tensor.flatten() for tensor in found])


def test_sixteen_bits_are_close():
    model, batch = a_model(), a_batch()
    plain = joined(gradients(model, batch, book.backward)[1:])
    in_slices = partial(book.backward_in_slices, half=True)
    half = joined(gradients(book.fast(model, half=True), batch, in_slices)[1:])
    assert 0 < (plain - half).norm() < 0.05 * plain.norm()


@pytest.mark.filterwarnings("ignore")  # those of torch.compile itself
@pytest.mark.parametrize("half", [False, True])
def test_compiled_gradients_are_close(half):
    model = book.fast(a_model(), half)
    plain = partial(book.backward_in_slices, half=half)
    batches = a_batch(), a_batch((5, 6, 20, 2, 2))
    expected = [gradients(model, batch, plain) for batch in batches]
    compiled = book.compiled_gradient(model, half)
    for batch, wanted in zip(batches, expected):
        wanted, found = (
            joined(wanted),
            joined(gradients(model, batch, compiled)),
        )
        assert (wanted - found).norm() < (
            0.05 if half else 1e-3
        ) * wanted.norm()


@pytest.mark.parametrize("beam", [1, 4])
def test_translations_are_those_of_the_processor(beam):
    folder = Path(book.__file__).parent / "results" / "model-de-en"
    sentences = [
        "Zwei Kinder spielen im Schnee.",
        "Ein Mann mit einem Hut liest auf einer Bank die Zeitung.",
        "Hunde.",
    ]
    here, there = (
        book.load_translator(folder, torch.device(device)).translate(
            sentences, beam=beam
        )
        for device in ("cpu", "cuda")
    )
    assert here == there


def test_a_run_goes_on_from_its_checkpoint(tmp_path, corpus):
    """Resumed after 20 of 40 updates: the same losses, but for rounding."""
    logs = []
    for name, stops in (("whole", [40]), ("in two", [20, 40])):
        out = tmp_path / name
        for steps in stops:
            resume = ["--resume"] if steps != stops[0] else []
            book.main(
                ["train", "--corpus", str(corpus), "--src", "de", "--tgt",
                 "en", "--preset", "tiny", "--pieces", "300", "--steps",
                 str(steps), "--save-every", "20", "--batch-tokens", "1024",
                 "--device", "cuda", "--out", str(out), *resume]
            )  # fmt: skip
        logs.append({e["step"]: e["loss"] for e in book.read_log(out)
                     if "loss" in e})  # fmt: skip
    whole, in_two = logs
    assert whole.keys() == in_two.keys() == {20, 40}
    assert whole[40] == pytest.approx(in_two[40], rel=1e-3)


@pytest.mark.parametrize("half", [False, True])
def test_recorded_updates_are_those_of_training(half):
    """Without dropout: the losses, and where the weights end."""
    gradient = partial(book.backward_in_slices, half=half)
    texts = [(pair.de, pair.en) for pair in book.toy_corpus()["train"][:300]]
    recipe = book.Recipe(
        steps=40, warmup=40, factor=0.1, batch_tokens=600, max_tokens=600,
        clip=1.0,
    )  # fmt: skip
    losses, ends = [], []
    for record in (False, True):
        torch.manual_seed(0)
        sizes = dict(N=1, d_model=32, d_ff=32, h=2, dropout=0.0)
        translator = book.untrained_translator(
            texts, ("de", "en"), sizes, pieces=300
        )
        model = book.fast(translator.model.to("cuda"), half)
        run = book.Run(
            translator, book.adam(model), book.MovingAverage(model, 0.9), {}
        )
        pairs = book.pack(translator, texts)
        if record:
            updates = book.RecordedUpdates(
                run, pairs, recipe, gradient, 40, torch.device("cuda")
            )
            found = []
            for update in updates:
                found.append(update.loss)
                with run.moving.inside(model):  # as a validation does
                    model.eval()
            losses.append(found)
        else:
            batches = book.stream(pairs, 600, 0, "cuda")
            found = []
            for update in book.training(
                model, batches, recipe, run.optimizer, gradient=gradient
            ):
                run.moving.update(model, update.step)
                found.append(update.loss)
            losses.append([sum(found[:20]) / 20, sum(found[20:]) / 20])
        ends.append([*model.state_dict().values(), *run.moving.weights])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if half else 1e-4)
    one, two = map(joined, ends)
    assert (one - two).norm() < (0.05 if half else 0.001) * one.norm()
