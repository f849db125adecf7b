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
def test_without_a_gpu_it_is_interpreted_and_compiled(interpreted, last):
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
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


@pytest.mark.filterwarnings("ignore")  # those of torch.compile itself
@pytest.mark.parametrize("half", [False, True])
def test_the_states_are_compiled_in_one_piece(half):
    """Each break in a graph would leave operations to wait for memory."""
    model = book.fast(book.tiny_model(), half).train()
    src = torch.tensor([[5, 6, 7, book.EOS], [8, 9, book.EOS, book.PAD]])
    found = torch._dynamo.explain(model.states)(src, src)
    assert found.graph_count == 1
    assert found.graph_break_count == 0, found.break_reasons
