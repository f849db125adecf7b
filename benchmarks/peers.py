"""The book's models in the programs of others, for comparison.

`marian` and `ct2` take our weights over, so that they must write what we
write: oracles for correctness, and peers in speed. `torch_transformer` is
the same architecture from torch's own parts, to be trained. `faithful`
shows that the first two give our outputs.
"""

import math
import sys
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import annotated_transformer as book  # noqa: E402
from annotated_transformer import BOS, EOS, PAD, UNK  # noqa: E402

NEVER = -1e4  # a bias that keeps a word from being written


# ------------------------------------------------------- transformers' Marian


def marian(model):
    """A MarianMTModel with the weights of a post-norm `model`.

    Its logits are ours, but for those of PAD, BOS and UNK, which it must
    never write. Attention's biases, which we lack, are taken out.
    """
    import transformers

    c = model.config
    if c.norm_first:
        raise book.InputError("Marian has no pre-norm: take a post-norm model")
    sizes = {"d_model": c.d_model, "vocab_size": c.src_vocab}
    sizes["decoder_vocab_size"] = c.tgt_vocab
    for side in ("encoder", "decoder"):
        sizes |= {
            f"{side}_layers": c.N,
            f"{side}_attention_heads": c.h,
            f"{side}_ffn_dim": c.d_ff,
        }
    table = model.position.table.detach()
    twin = transformers.MarianMTModel(
        transformers.MarianConfig(
            **sizes,
            activation_function="relu",
            scale_embedding=True,
            dropout=c.dropout,
            share_encoder_decoder_embeddings=c.shared,
            max_position_embeddings=len(table),
            decoder_start_token_id=BOS,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
            forced_eos_token_id=None,
        )
    )
    twin.eval()
    with torch.no_grad():
        fill_marian(twin, model, table)
    return twin


def fill_marian(twin, model, table):
    """Copy all weights of `model` into its twin."""
    twin.final_logits_bias[:, [PAD, BOS, UNK]] = NEVER
    for stack, other, embedding in (
        (model.encoder, twin.model.encoder, model.src_embedding),
        (model.decoder, twin.model.decoder, model.tgt_embedding),
    ):
        other.embed_tokens.weight.copy_(embedding.weight)
        other.embed_positions.weight.copy_(table)  # ours takes turns
        for layer, theirs in zip(stack.layers, other.layers):
            norms = [residual.norm for residual in layer.residuals]
            fill_heads(theirs.self_attn, layer.self_attention)
            same(theirs.self_attn_layer_norm, norms[0])
            if isinstance(layer, book.DecoderLayer):
                fill_heads(theirs.encoder_attn, layer.cross_attention)
                same(theirs.encoder_attn_layer_norm, norms[1])
            same(theirs.final_layer_norm, norms[-1])
            same(theirs.fc1, layer.feed_forward.W_1)
            same(theirs.fc2, layer.feed_forward.W_2)
    twin.lm_head.weight.copy_(model.tgt_embedding.weight)


def fill_heads(theirs, ours):
    """Copy an attention's four maps; leave out the biases."""
    for name, linear in (("q", "W_Q"), ("k", "W_K"), ("v", "W_V"),
                         ("out", "W_O")):  # fmt: skip
        other = getattr(theirs, f"{name}_proj")
        other.weight.copy_(getattr(ours, linear).weight)
        other.bias = None


def same(theirs, ours):
    """Copy weight and bias of one module."""
    theirs.load_state_dict(ours.state_dict())


def marian_writes(twin, src, width=1, alpha=0.0, extra=50):
    """What `generate` writes for (B, S) source ids: B lists, as ours.

    Width 1 is greedy. Its penalty is length ** alpha, not ours; its limit
    is that of the longest source, for all.
    """
    limit = int((src != PAD).sum(-1).max()) + extra
    room = len(twin.model.decoder.embed_positions.weight) - 1
    beam = {}
    if width > 1:  # whose last word may only be EOS, as ours
        beam = {"length_penalty": alpha, "early_stopping": True}
        beam |= {"num_beams": width, "forced_eos_token_id": EOS}
        limit += 1
    with torch.no_grad():
        found = twin.generate(
            input_ids=src,
            attention_mask=(src != PAD).long(),
            do_sample=False,
            max_length=None,
            max_new_tokens=min(limit, room),
            **beam,
        )
    return [until_end(row) for row in found[:, 1:].tolist()]


def until_end(row):
    """Ids without the end symbol and what follows it."""
    end = [i for i, word in enumerate(row) if word in (EOS, PAD)]
    return row[: end[0]] if end else row


# ---------------------------------------------------------------- CTranslate2


def bare_translator(model):
    """A translator for a model that has no words: each id is its own word."""
    sizes = model.config.src_vocab, model.config.tgt_vocab
    vocabs = [
        book.Vocabulary([*book.SPECIALS, *map(str, range(4, size))])
        for size in sizes
    ]
    return book.Translator(model, vocabs, ("src", "tgt"))


def ct2(model, folder, quantization="none", threads=None):
    """`model`, exported to a new folder, as CTranslate2's translator.

    `folder` may be None: then it is only kept in memory for as long as the
    translator lives.
    """
    import tempfile

    import ctranslate2

    place = None
    if folder is None:
        place = tempfile.TemporaryDirectory()
        folder = Path(place.name) / "model"
    book.export_ctranslate2(bare_translator(model), folder, quantization)
    threads = threads or torch.get_num_threads()
    kind = "default" if quantization == "none" else quantization
    twin = ctranslate2.Translator(
        str(folder), intra_threads=threads, compute_type=kind
    )
    if place:
        place.cleanup()  # it has been read
    return twin


def ct2_writes(twin, src, width=1, alpha=0.0, extra=50):
    """What CTranslate2 writes for (B, S) source ids: B lists, as ours.

    Each source must end with EOS, which the export adds by itself. The
    penalty is length ** alpha.
    """
    rows = [[word for word in row if word != PAD] for row in src.tolist()]
    assert all(row[-1] == EOS for row in rows)
    words = [*book.SPECIALS]
    texts = [[words[i] if i < 4 else str(i) for i in row[:-1]] for row in rows]
    limit = max(map(len, rows)) + extra
    found = twin.translate_batch(
        texts, beam_size=width, length_penalty=alpha, max_input_length=0,
        min_decoding_length=0, max_decoding_length=limit,
    )  # fmt: skip
    return [[int(w) for w in result.hypotheses[0]] for result in found]


# ------------------------------------------------------ torch's own parts


class TorchTransformer(nn.Module):
    """The paper's model from nn.Transformer, nn.Embedding and nn.Dropout.

    For a post-norm Config. Tied embeddings like ours; attention has biases,
    which torch's module cannot do without.
    """

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.scale = math.sqrt(c.d_model)
        self.src_embedding = nn.Embedding(c.src_vocab, c.d_model)
        self.tgt_embedding = self.src_embedding
        if not c.shared:
            self.tgt_embedding = nn.Embedding(c.tgt_vocab, c.d_model)
        table = book.positional_encoding(1024, c.d_model)
        self.register_buffer("table", table, persistent=False)
        self.drop = nn.Dropout(c.dropout)
        with warnings.catch_warnings():  # of a speed-up in use alone
            warnings.simplefilter("ignore")
            self.stacks = nn.Transformer(
                c.d_model, c.h, c.N, c.N, c.d_ff, c.dropout,
                batch_first=True, norm_first=c.norm_first,
            )  # fmt: skip
        self.stacks.encoder.use_nested_tensor = False
        if not c.norm_first:
            self.stacks.encoder.norm = self.stacks.decoder.norm = None
        for layer in self.stacks.modules():
            if isinstance(layer, nn.MultiheadAttention):
                layer.dropout = c.attention_dropout
        for name in ("encoder", "decoder"):  # the paper drops at 3 places
            for layer in getattr(self.stacks, name).layers:
                layer.dropout = nn.Identity()  # not after the ReLU
        for weight in (self.src_embedding.weight, self.tgt_embedding.weight):
            nn.init.normal_(weight, std=1 / self.scale)

    def enter(self, embedding, tokens):
        """(B, T) tokens -> (B, T, D)"""
        x = embedding(tokens) * self.scale
        return self.drop(x + self.table[: tokens.size(1)])

    def forward(self, src, tgt):
        """(B, S) and (B, T) tokens -> logits (B, T, V)"""
        T, hidden = tgt.size(1), src == PAD  # True may not attend
        states = self.stacks(
            self.enter(self.src_embedding, src),
            self.enter(self.tgt_embedding, tgt),
            tgt_mask=~book.causal_mask(T, tgt.device),
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
            tgt_key_padding_mask=tgt == PAD,
            tgt_is_causal=True,
        )
        return F.linear(states, self.tgt_embedding.weight)

    def loss(self, batch, smoothing=0.1):
        """The mean smoothed loss of a Batch over its real labels."""
        logits = self(batch.src, batch.read)
        return F.cross_entropy(
            logits.flatten(0, 1), batch.labels.flatten(),
            ignore_index=PAD, label_smoothing=smoothing,
        )  # fmt: skip


def torch_transformer(config):
    """The same architecture from torch's parts, with its own weights."""
    return TorchTransformer(config)


def fill_torch(theirs, model):
    """Copy the weights of `model`; torch's attention biases become 0."""
    with torch.no_grad():
        theirs.src_embedding.weight.copy_(model.src_embedding.weight)
        theirs.tgt_embedding.weight.copy_(model.tgt_embedding.weight)
    for stack, other in (
        (model.encoder, theirs.stacks.encoder),
        (model.decoder, theirs.stacks.decoder),
    ):
        if other.norm is not None:
            same(other.norm, stack.norm)
        for layer, twin in zip(stack.layers, other.layers):
            book.copy_attention(layer.self_attention, twin.self_attn)
            zero_biases(twin.self_attn)
            if isinstance(layer, book.DecoderLayer):
                heads = twin.multihead_attn
                book.copy_attention(layer.cross_attention, heads)
                zero_biases(heads)
            same(twin.linear1, layer.feed_forward.W_1)
            same(twin.linear2, layer.feed_forward.W_2)
            for number, residual in enumerate(layer.residuals, 1):
                same(getattr(twin, f"norm{number}"), residual.norm)
    return theirs


def zero_biases(heads):
    """Take the biases of an nn.MultiheadAttention to 0."""
    nn.init.zeros_(heads.in_proj_bias)
    nn.init.zeros_(heads.out_proj.bias)


def punctual_model(config, words):
    """A random post-norm model that writes just so many words, then EOS.

    Its weights alone see to it, so that every program can run it: dimension
    0 of the stream tells, by its sign, whether the place is before the last,
    and only EOS looks at it; dimension 1 is constant, and keeps PAD, BOS and
    UNK from being written. So all hypotheses end in one step, and the
    programs' rules for length penalties and for full beams coincide.
    """
    assert not config.norm_first and config.shared
    model = book.Transformer(config).eval()
    with torch.no_grad():
        model.position.table.normal_()  # to write unlike things
        model.position.table[:, 0] = 10
        model.position.table[words:, 0] = -10
        weight = model.tgt_embedding.weight
        weight[:, :2] = 0
        weight[EOS, 0] = -20
        weight[[PAD, BOS, UNK], 1] = -10
        for name, matrix in model.named_parameters():
            if name.endswith(("W_O.weight", "W_2.weight", "W_2.bias")):
                matrix[0] = 0  # nothing else writes to dimension 0
        for layer in model.decoder.layers:
            own, across = layer.self_attention, layer.cross_attention
            for linear in (own.W_Q, own.W_K, own.W_V, across.W_Q,
                           layer.feed_forward.W_1):  # fmt: skip
                linear.weight[:, 0] = 0  # and nothing else reads it
            across.W_Q.weight *= 16  # look at single words
            across.W_O.weight *= 8  # do not just repeat the last
            for residual in layer.residuals:  # or the sign would drown
                residual.norm.weight[0] = 3
        last = model.decoder.layers[-1].residuals[-1].norm
        last.weight[0] = 4 / math.sqrt(config.d_model)
        last.weight[1], last.bias[1] = 0, 1
    return model


def faithful(model, src, width=1, alpha=0.0, extra=50):
    """{program: (outputs, how many are not ours)} for source ids.

    `src` (B, S), each row with EOS at its end. Ours are greedy at width 1.
    """
    if width == 1:
        ours = book.greedy(model, src, extra)
    else:
        found = book.beam_search(model, src, width, alpha, extra)
        ours = [hypotheses[0].tokens for hypotheses in found]
    twin = ct2(model, None)
    outputs = {
        "ours": ours,
        "ct2": ct2_writes(twin, src, width, alpha, extra),
    }
    if not model.config.norm_first:
        twin = marian(model)
        outputs["marian"] = marian_writes(twin, src, width, alpha, extra)
    return {
        program: (texts, sum(a != b for a, b in zip(texts, ours)))
        for program, texts in outputs.items()
    }
