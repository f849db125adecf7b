"""Attention by the kernel, beside `attention`: cases for a GPU, and for none.

As a program it runs them all with Triton's interpreter, on the processor, or
compiles the kernels for GPUs that need not be there:

    TRITON_INTERPRET=1 python tests/kernel_cases.py
    python tests/kernel_cases.py
"""

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import annotated_transformer as book  # noqa: E402

# Texts, queries, keys, heads, and numbers in a head; queries = keys: of itself
SIZES = [
    (2, 9, 9, 2, 32), (3, 20, 20, 1, 16), (2, 64, 64, 2, 64), (1, 1, 1, 2, 16),
    (2, 5, 33, 2, 32), (4, 40, 7, 2, 16), (2, 17, 64, 1, 128),
    (2, 64, 64, 1, 128), (3, 1, 1, 2, 16),
]  # fmt: skip


def by_the_formula(x, memory, mask, h):
    """What `short_attention` computes, by `attention`."""
    three = book.queries_keys_values(x, memory)
    Q, K, V = (y.unflatten(-1, (h, -1)).transpose(1, 2) for y in three)
    heads, _ = book.attention(Q, K, V, mask)
    return heads.transpose(1, 2).flatten(-2)


def a_case(sizes, own_rows, device, kind):
    """(x, memory, mask, h), and a gradient at the heads."""
    B, n, m, h, k = sizes

    def draw(*shape):  # with rows of its own also in memory of another order
        x = torch.randn(*shape, device=device, dtype=kind)
        if own_rows and shape[1] == 1:  # contiguous, whatever the stride is
            B, _, D = shape
            return x.as_strided(shape, (D, B * D, 1))
        return x.mT.contiguous().mT if own_rows else x

    cross = n != m
    x = draw(B, n, (1 if cross else 3) * h * k).requires_grad_()
    memory = draw(B, m, 2 * h * k).requires_grad_() if cross else None
    mask = torch.rand(B, 1, n if own_rows else 1, m, device=device) < 0.7
    mask[-1, :, 0] = False  # a query that may look nowhere
    return (x, memory, mask, h), draw(B, n, h * k)


def heads_and_gradients(function, case, gradient):
    """The heads, and the gradients at x and memory, in 64 bits."""
    heads = function(*case)
    inputs = [y for y in case[:2] if y is not None]
    found = heads, *torch.autograd.grad(heads, inputs, gradient)
    return [y.double() for y in found]


def in_64_bits(case, gradient):
    """The same by the formula, with numbers of 64 bits."""
    x, memory = (
        y if y is None else y.detach().double().requires_grad_()
        for y in case[:2]
    )
    case = x, memory, *case[2:]
    return heads_and_gradients(by_the_formula, case, gradient.double())


def check_case(sizes, own_rows, device, kind, most, compiled=False):
    """The kernel's results differ from the formula's by `most` at most."""
    torch.manual_seed(0)
    case, gradient = a_case(sizes, own_rows, device, kind)
    function = book.short_attention
    if compiled:
        function = torch.compile(lambda *case: book.short_attention(*case) * 1)
    expected = in_64_bits(case, gradient)
    for right, found in zip(
        expected, heads_and_gradients(function, case, gradient)
    ):
        assert found.shape == right.shape
        error = (found - right).norm()
        assert error <= most * right.norm(), (sizes, own_rows, error)


def check_operation(device, kind):
    """What torch asks of an operation: shapes, gradients, no side effects."""
    for sizes in SIZES[0], SIZES[4]:
        case, _ = a_case(sizes, True, device, kind)
        torch.library.opcheck(book.short_attention, case)


SHARED = 99 * 1024  # bytes that a block has on GPUs of kinds 86, 89 and 120


def check_compiled(kernel, blocks, capability):
    """Triton makes a program of it, with products by the matrix units."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = dict.fromkeys("KNM", "constexpr") | {"mask": "*i1"}
    tensors = {"queries", "keys", "values", "heads", "gradient"}
    names = kernel.arg_names
    kinds |= {n: "*bf16" for n in names if n.removeprefix("at_") in tensors}
    kinds |= {"scale": "fp32"}
    done = triton.compile(
        ASTSource(kernel, {n: kinds.get(n, "i32") for n in names}, blocks),
        target=GPUTarget("cuda", capability, 32),
    )
    assert "mma" in done.asm["ptx"], (kernel, blocks, capability)
    assert done.metadata.shared <= SHARED, (kernel, blocks, capability)


def check_all_compiled():
    """Both kernels, for GPUs of 2020 to 2025, with blocks of all kinds."""
    book.make_kernels()
    for kernel in book.attention_kernel, book.attention_kernel_back:
        for K, N, M, capability in (
            (64, 32, 32, 80), (16, 16, 64, 80), (128, 64, 16, 90)
        ):  # fmt: skip
            check_compiled(kernel, {"K": K, "N": N, "M": M}, capability)
        for capability in 86, 120:  # the largest blocks, the least room
            check_compiled(kernel, {"K": 128, "N": 64, "M": 64}, capability)


if __name__ == "__main__":
    if "TRITON_INTERPRET" not in os.environ:
        check_all_compiled()
        sys.exit(print("both kernels are compiled"))
    for sizes in SIZES:
        for own_rows in False, True:
            check_case(sizes, own_rows, "cpu", torch.float, 1e-5)
    check_case(SIZES[4], True, "cpu", torch.float, 1e-5, compiled=True)
    check_operation("cpu", torch.float)
    print("the kernel computes what the formula does")
