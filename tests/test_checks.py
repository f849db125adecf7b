"""The book's own checks hold, and each refuses a model that is wrong."""

import sys
import types
from pathlib import Path

import pytest

import annotated_transformer as book

SOURCE = Path(book.__file__).read_text(encoding="utf-8")

# A slip of the kind people make, and the check that must notice it.
SLIPS = {
    "biased variance": (
        "square().mean(dim=-1, keepdim=True)",
        "square().sum(dim=-1, keepdim=True) / (x.size(-1) - 1)",
        "layer_norm_equals_torch",
    ),
    "epsilon outside the root": (
        "torch.sqrt(variance + eps) + bias",
        "(torch.sqrt(variance) + eps) + bias",
        "layer_norm_equals_torch",
    ),
    "scores not divided": (
        "/ math.sqrt(K.size(-1))  # (..., T, S)",
        "# (..., T, S)",
        "attention_equals_torch",
    ),
    "mask the wrong way round": (
        "scores.masked_fill(~mask, lowest)",
        "scores.masked_fill(mask, lowest)",
        "attention_equals_torch",
    ),
    "masked with minus infinity": (
        "lowest = torch.finfo(scores.dtype).min",
        "lowest = -math.inf",
        "attention_rows_sum_to_one",
    ),
    "softmax over the queries": (
        "weights = scores.softmax(dim=-1)  # (..., T, S)",
        "weights = scores.softmax(dim=-2)  # (..., T, S)",
        "attention_rows_sum_to_one",
    ),
    "heads cut across positions": (
        "return x.unflatten(-1, (self.h, self.d_k)).transpose(1, 2)",
        "return x.reshape(x.size(0), self.h, -1, self.d_k)",
        "multi_head_attention_equals_torch",
    ),
    "key and value exchanged": (
        "V = self.split(self.W_V(value))",
        "V = self.split(self.W_V(query))",
        "multi_head_attention_equals_torch",
    ),
    "no ReLU": (
        "hidden = self.W_1(x).relu()",
        "hidden = self.W_1(x)",
        "feed_forward_is_two_convolutions",
    ),
    "wrong exponent of the encoding": (
        "angle = position / 10_000 ** (pairs / d_model)",
        "angle = position / 10_000 ** (2 * pairs / d_model)",
        "shifting_is_linear",
    ),
    "positions forgotten": (
        "return self.drop(x + self.table[: x.size(1)])",
        "return self.drop(x)",
        "without_positions_order_is_lost",
    ),
    "a bias too many": (
        "nn.Linear(d, d, bias=False) for _ in range(4)",
        "nn.Linear(d, d) for _ in range(4)",
        "parameter_count_is_the_formula",
    ),
    "the same matrix counted twice": (
        "self.src_embedding  # one object, not a copy",
        "Embedding(config.src_vocab, config.d_model)",
        "parameter_count_is_the_formula",
    ),
    "tied by value only": (
        "self.src_embedding  # one object, not a copy",
        "Embedding(config.src_vocab, config.d_model)",
        "tied_weights_stay_tied",
    ),
    "pre-norm by default": (
        "if self.norm_first:\n            return x +",
        "if not self.norm_first:\n            return x +",
        "model_equals_torch",
    ),
    "no final norm for pre-norm": (
        "last = nn.LayerNorm if config.norm_first else nn.Identity",
        "last = lambda size: nn.Identity()",
        "model_equals_torch",
    ),
    "cross-attention without its mask": (
        "self.cross_attention(q, memory, memory, src_mask)",
        "self.cross_attention(q, memory, memory)",
        "padding_changes_nothing",
    ),
    "the target's mask in cross-attention": (
        "self.cross_attention(q, memory, memory, src_mask)",
        "self.cross_attention(q, memory, memory, tgt_mask[:, :, -1:])",
        "model_equals_torch",
    ),
    "the future one step too near": (
        "return full.tril()",
        "return full.tril(1)",
        "the_future_is_hidden",
    ),
    "padding seen": (
        "return (tokens != PAD)[:, None, None, :]",
        "return (tokens == tokens)[:, None, None, :]",
        "padding_changes_nothing",
    ),
    "rows masked, not columns": (
        "return (tokens != PAD)[:, None, None, :]",
        "return (tokens != PAD)[:, None, :, None]",
        "padding_changes_nothing",
    ),
    "the last batch lost": (
        "    groups.append(group)\n    order",
        "    order",
        "batches_hold_each_pair_once",
    ),
    "a budget that forgets the padding": (
        "widths[i] * (len(group) + 1) > max_tokens",
        "sum(widths[j] for j in group) > max_tokens",
        "batches_hold_each_pair_once",
    ),
    "dropout in evaluation": (
        "self.drop = nn.Dropout(config.dropout)\n        table",
        "self.drop = lambda x: F.dropout(x, config.dropout)\n        table",
        "evaluation_is_deterministic",
    ),
    "smoothing over all words but one": (
        "smoothing / vocab)\n    rows",
        "smoothing / (vocab - 1))\n    rows",
        "smoothed_loss_equals_torch",
    ),
    "smoothing on padding rows": (
        "return targets * (labels != PAD)[:, None]",
        "return targets",
        "smoothed_loss_equals_torch",
    ),
    "each part divided by its own tokens": (
        "(loss / tokens).backward()",
        "(loss / batch.count()).backward()",
        "accumulated_gradient_is_the_large_one",
    ),
    "padding counted in the loss": (
        "real = batch.labels != PAD  # (B, T)",
        "real = batch.labels >= PAD  # (B, T)",
        "accumulated_gradient_is_the_large_one",
    ),
    "a slice of the loss lost": (
        "zip(leaf.split(rows), labels.split(rows))",
        "zip(leaf.split(rows)[:2], labels.split(rows))",
        "accumulated_gradient_is_the_large_one",
    ),
    "a rate that lags by one": (
        "learning_rate(step, size",
        "learning_rate(max(step - 1, 1), size",
        "rate_is_the_formula",
    ),
    "a rate set after the update": (
        'group["lr"] = rate\n        optimizer.step()',
        'group["lr"] = rate * 0.9\n        optimizer.step()',
        "rate_is_the_formula",
    ),
    "a wrong constant in the schedule": (
        "min(n**-0.5, n * warmup**-1.5)",
        "min(n**-0.5, n * warmup**-1.6)",
        "rate_is_the_formula",
    ),
    "padding seen while decoding": (
        "state = model.decode(tgt, memory, mask)",
        "state = model.decode(tgt, memory, mask | True)",
        "batching_changes_no_translation",
    ),
    "one length limit for the whole batch": (
        "limits = (src != PAD).sum(-1) + extra",
        "limits = src.new_full((len(src),), src.size(1) + extra)",
        "batching_changes_no_translation",
    ),
    "one attention row too heavy": (
        "self.weights = None if self.training else weights.detach()",
        "self.weights = None if self.training else 1.01 * weights.detach()",
        "multi_head_attention_equals_torch",
    ),
}


def load(source, name):
    """The book's definitions from a changed source."""
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses look themselves up there
    try:
        exec(compile(source, name, "exec"), module.__dict__)
    finally:
        del sys.modules[name]
    return module


@pytest.mark.parametrize("name", book.CHECKS)
def test_check_holds(name):
    book.run_seeded(book.CHECKS[name])


@pytest.mark.parametrize("seed", [1, 2])
def test_checks_hold_from_any_seed(seed):
    for function in book.CHECKS.values():
        book.run_seeded(function, seed)


@pytest.mark.parametrize("slip", SLIPS)
def test_check_refuses(slip):
    right, wrong, name = SLIPS[slip]
    assert right in SOURCE, "the source has changed: bring the slip up to date"
    broken = load(SOURCE.replace(right, wrong, 1), "broken_book")
    with pytest.raises((AssertionError, RuntimeError)):
        broken.run_seeded(broken.CHECKS[name])


def test_every_check_has_a_slip_that_it_refuses():
    refused = {name for _, _, name in SLIPS.values()}
    by_nature = {
        # These compare two formulas of which neither is ours to break,
        # or need a trained model (see test_attention.py).
        "attention_ignores_order",
        "divergence_has_the_same_gradient",
        "attention_maps_sum_to_one",
    }
    assert set(book.CHECKS) - refused == by_nature
