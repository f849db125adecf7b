"""The kernel for attention over short texts, where there is no GPU for it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import annotated_transformer as book

CASES = Path(__file__).parent / "kernel_cases.py"


@pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="there is no Triton"
)
@pytest.mark.parametrize(
    ("interpreted", "last"),
    [
        (True, "the kernel computes what the formula does\n"),
        (False, "both kernels are compiled\n"),
    ],
)
def test_without_a_gpu_it_is_interpreted_and_compiled(
    interpreted, last, tmp_path
):
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    # Not what torch.compile kept of a run that used other instructions: with
    # ATEN_CPU_CAPABILITY=avx2 before, and without now, it corrupts memory.
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, str(CASES)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(last)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, True),
        ({"places": 65}, False),
        ({"m": 65}, False),
        ({"d_k": 48}, False),
        ({"kind": torch.float}, False),
        ({"mask": None}, False),
        ({"heads": 4}, False),  # a mask of its own for each head
        ({"dropout": 0.1}, False),
        ({"kernels": False}, False),
    ],
)
def test_the_kernel_is_for_short_texts_and_few_widths(change, wanted):
    case = {
        "places": 64, "m": 64, "d_k": 32, "kind": torch.bfloat16, "heads": 1,
        "dropout": 0.0, "kernels": True,
    } | change  # fmt: skip
    config = book.Config(
        20, 20, N=1, d_model=4 * case["d_k"], d_ff=8, h=4,
        attention_dropout=case["dropout"],
    )  # fmt: skip
    model = book.fast(book.Transformer(config))
    part = model.decoder.layers[0].cross_attention
    part.kernels = case["kernels"]
    x = torch.zeros(2, case["places"], config.d_model, dtype=case["kind"])
    memory = torch.zeros(2, case["m"], 2 * config.d_model)
    mask = torch.ones(2, case["heads"], 1, case["m"], dtype=torch.bool)
    mask = change.get("mask", mask)
    assert part.has_kernel(x.as_subclass(OnGpu), memory, mask) == wanted
    assert not part.has_kernel(x, memory, mask)  # on the processor


def test_where_triton_can_not_run_torch_attends(monkeypatch):
    """A GPU alone is not enough; without all the rest training goes on."""
    ask = book.kernels_run.__wrapped__
    assert not ask(torch.device("cpu"))
    gpu = torch.device("cuda")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.version, "hip", None)

    def failing(*case):
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setattr(book, "short_attention", failing)
    monkeypatch.setattr(torch, "zeros", lambda *x, **how: torch.ones(1, 1, 48))
    kind = [(8, 0)]
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: kind[0]
    )
    with pytest.warns(UserWarning, match="not our kernel: Failed.*compiler"):
        assert not ask(gpu)
    monkeypatch.setattr(book, "short_attention", lambda *case: None)
    assert ask(gpu)
    monkeypatch.setattr(torch.version, "hip", "6.2")  # AMD's GPUs
    assert not ask(gpu)
    monkeypatch.setattr(torch.version, "hip", None)
    kind[0] = 7, 5
    assert not ask(gpu)


@pytest.mark.filterwarnings("ignore")  # those of torch.compile itself
@pytest.mark.parametrize("half", [False, True])
def test_the_states_are_compiled_in_one_piece(half):
    """Each break in a graph would leave operations to wait for memory."""
    model = book.fast(book.tiny_model(), half).train()
    src = torch.tensor([[5, 6, 7, book.EOS], [8, 9, book.EOS, book.PAD]])
    found = torch._dynamo.explain(model.states)(src, src)
    assert found.graph_count == 1
    assert found.graph_break_count == 0, found.break_reasons
