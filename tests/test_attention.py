"""The attention of a model of the generated corpus, and what shows it.

All this holds of any weights. What the book's own training reaches is told
by its run: see test_notebook.py.
"""

import copy

import pytest
import torch

import annotated_transformer as book


@pytest.fixture(scope="module")
def translator(toy_translator):
    return toy_translator


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_check_of_the_book_holds(seed, translator):
    book.run_seeded(book.CHECKS["attention_maps_sum_to_one"], seed)


def test_attention_labels_are_the_right_words(translator):
    output, maps, labels = book.attention_maps(
        translator, book.SENTENCE.split()
    )
    source = [*book.SENTENCE.split(), "</s>"]
    assert labels["encoder self-attention"] == (source, source)
    rows, columns = labels["cross-attention"]
    assert columns == source
    assert rows[0] == f"<s> → {output[0]}"
    assert rows[-1] == f"{output[-1]} → </s>"
    assert labels["decoder self-attention"] == (rows, ["<s>", *output])
    for kind, weights in maps.items():
        shape = tuple(map(len, labels[kind]))
        assert weights.shape == (2, 4, *shape)


def test_maps_are_of_their_layers_and_heads(translator):
    _, maps, _ = book.attention_maps(translator, book.SENTENCE.split())
    for kind, found in maps.items():
        layers = book.attentions(translator.model, kind)
        assert found.equal(torch.cat([part.weights for part in layers]))


def test_an_attention_that_keeps_no_weights_is_named(translator):
    class Forgetful(book.MultiHeadAttention):
        def forward(self, *inputs):
            found = super().forward(*inputs)
            self.weights = None
            return found

    ours = copy.copy(translator)
    ours.model = book.exchange(
        copy.deepcopy(translator.model), {book.FusedAttention: Forgetful}
    )
    with pytest.raises(book.InputError, match="keeps no `weights`"):
        book.attention_maps(ours, book.SENTENCE.split())


def test_attention_is_that_of_a_step_by_step_run(translator):
    """The row for word t is the one seen when word t is really written."""
    words = book.SENTENCE.split()
    output, maps, _ = book.attention_maps(translator, words)
    src, tgt = translator.encode_pair(words, output)
    model = translator.model.eval()
    last = model.decoder.layers[-1].cross_attention
    for t in range(1, len(tgt)):
        with torch.no_grad():
            model(torch.tensor([src]), torch.tensor([tgt[:t]]))
        torch.testing.assert_close(
            last.weights[0, :, -1], maps["cross-attention"][-1][:, t - 1]
        )


@pytest.fixture(scope="module")
def explorer(translator):
    """The explorer of one sentence, as the dict that is drawn."""
    return book.attention_explorer(
        translator, [book.SENTENCE], [[(0, 1), (5, 2)]]
    ).to_dict()


def test_the_explorer_holds_every_weight(translator, explorer):
    """In percent, each at its place, for each kind, layer and head."""
    _, maps, _ = book.attention_maps(translator, book.SENTENCE.split())
    [rows] = [
        rows for rows in explorer["datasets"].values() if "percent" in rows[0]
    ]
    found = {
        (r["kind"], r["layer"], r["head"], r["query"]): r["percent"]
        for r in rows
    }
    assert len(found) == len(rows)
    count = 0
    for kind, name in enumerate(book.KINDS):
        tensor = maps[name]
        for n, layer in enumerate(tensor, 1):
            for h, head in enumerate(layer, 1):
                for t, row in enumerate(head):
                    shown = [
                        int(p) / 100 for p in found[kind, n, h, t].split()
                    ]
                    shown = torch.tensor(shown)
                    torch.testing.assert_close(shown, row, atol=0.005, rtol=0)
                    count += 1
    assert count == len(rows)


def test_the_explorer_lets_choose_all_of_them(explorer):
    switches = {p["name"]: p for p in explorer["params"] if "bind" in p}
    options = {name: p["bind"]["options"] for name, p in switches.items()}
    assert options == {
        "the_sentence": [0],
        "the_kind": [0, 1, 2],
        "the_layer": [1, 2],
        "the_head": [1, 2, 3, 4],
    }
    assert all(p["value"] in options[name] for name, p in switches.items())
    assert switches["the_layer"]["value"] == 2  # the last
    assert switches["the_sentence"]["bind"]["labels"] == [book.SENTENCE]
    assert switches["the_kind"]["bind"]["labels"] == [*book.KINDS]


def test_the_explorer_rings_the_alignment(explorer):
    """German word 5 belongs to English word 2: key 5 of the row writing it."""
    [rows] = [
        rows
        for rows in explorer["datasets"].values()
        if rows and set(rows[0]) == {"sentence", "kind", "query", "key"}
    ]
    assert {(r["key"], r["query"]) for r in rows} == {(0, 1), (5, 2)}
    assert [book.KINDS[r["kind"]] for r in rows] == ["cross-attention"] * 2


def test_every_word_of_the_accuracy_is_counted(translator):
    """An attention that looked right by construction would score 1."""

    class Oracle:
        src, tgt = "de", "en"
        encode_pair = translator.encode_pair

    pair = book.toy_corpus()["test"][3]
    layer = torch.nn.Module()
    layer.cross_attention = torch.nn.Module()
    S, T = len(pair.de.split()) + 1, len(pair.en.split()) + 1
    weights = torch.zeros(1, 2, T, S)
    for german, english in pair.alignment:
        weights[0, 0, english, german] = 1  # head 1 is right, head 2 not
        weights[0, 1, english, S - 1] = 1
    layer.cross_attention.weights = weights

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = torch.nn.Module()
            self.decoder.layers = torch.nn.ModuleList([layer])
            self.one = torch.nn.Parameter(torch.zeros(1))

        def forward(self, src, tgt):
            return None

    oracle = Oracle()
    oracle.model = Model()
    assert book.alignment_accuracy(oracle, [pair]).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("at", [-1, 0])
@pytest.mark.parametrize("kind", book.KINDS[:2])
def test_parts_are_what_goes_missing_with_a_words_value(translator, kind, at):
    """Each word's part, found by leaving its value out of one head."""
    pair, h = book.toy_corpus()["test"][3], 2
    # A small part is found as a difference, and divided by a small weight.
    model = copy.deepcopy(translator.model).double()
    module = book.attentions(model, kind)[at]
    src, tgt = translator.encode_pair(pair.de.split(), pair.en.split())
    found = book.weights_and_parts(model, [(src, tgt)], kind, at)
    shown = found[:, at, h]

    outputs, hidden = [], []

    def hide(_, inputs, values):
        values = values.clone()
        others = torch.arange(values.size(-1)) // module.d_k != h
        values[..., others] = 0
        values[:, hidden] = 0
        return values

    def keep(_, inputs, output):
        outputs.append(output[0])  # (T, D)

    hooks = (
        module.W_V.register_forward_hook(hide),
        module.register_forward_hook(keep),
    )
    batch = book.Batch(torch.tensor([src]), torch.tensor([tgt]))
    with book.evaluating(model, maps=True):
        for places in ([], *([j] for j in range(len(src)))):
            hidden[:] = places
            model(batch.src, batch.read)
    for hook in hooks:
        hook.remove()
    whole, *lacking = outputs
    missing = torch.stack([(whole - o).norm(dim=-1) for o in lacking], -1)
    weights = module.weights[0, h]  # (T, S)
    lengths = (missing / weights).mean(0)
    others = [j for j in range(len(src)) if j != at % len(src)]
    expected = [
        weights[:, at].mean(),
        lengths[at] / lengths[others].mean(),
        (missing[:, at] / missing.sum(-1)).mean(),
        (weights.argmax(-1) == missing.argmax(-1)).float().mean(),
    ]
    torch.testing.assert_close(
        shown, torch.stack(expected), rtol=1e-3, atol=1e-4
    )


def test_measuring_leaves_no_hook_behind(translator):
    model, pair = translator.model, book.toy_corpus()["test"][0]
    ids = translator.encode_pair(pair.de.split(), pair.en.split())
    book.weights_and_parts(model, [ids], book.KINDS[0])
    modules = model.modules()
    assert not any(m._forward_pre_hooks for m in modules)


def test_one_text_is_not_taken_for_a_list(translator):
    """Its letters would be words, and nearly all of them unknown."""
    with pytest.raises(book.InputError, match="list of tokens"):
        book.attention_maps(translator, book.SENTENCE)
    with pytest.raises(book.InputError, match="list of texts"):
        book.attention_explorer(translator, book.SENTENCE)


def test_the_explorer_needs_a_sentence_and_a_head_that_is_there(translator):
    with pytest.raises(book.InputError, match="at least one"):
        book.attention_explorer(translator, [])
    for head in (0, 5):
        with pytest.raises(book.InputError, match=f"no head {head}.* 1 to 4"):
            book.attention_explorer(translator, [book.SENTENCE], head=head)
