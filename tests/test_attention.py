"""A model trained on the generated corpus: its score and its attention."""

import pytest
import torch

import annotated_transformer as book

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def translator():
    return book.toy_translator()[0]


def test_unseen_combinations_reach_bleu_95(translator):
    outputs, references = book.toy_test(translator)
    assert len(outputs) == 1000
    assert book.bleu(outputs, references).score >= 95


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


@pytest.mark.parametrize("kind", ["encoder self-", "decoder self-", "cross-"])
def test_each_chart_holds_every_layer_and_head(translator, kind):
    kind += "attention"
    chart = book.attention_chart(translator, book.SENTENCE, kind).to_dict()
    [rows] = chart["datasets"].values()
    assert {(r["layer"], r["head"]) for r in rows} == {
        (n, f"head {h}") for n in (1, 2) for h in (1, 2, 3, 4)
    }
    assert chart["encoding"]["x"]["title"] == "key"
    assert chart["encoding"]["y"]["title"] == "query"
    assert kind in chart["description"]
    assert len(rows) < 5000


def test_some_head_has_learned_the_alignment(translator):
    pairs = book.toy_corpus()["test"][:100]
    torch.manual_seed(1)
    vocabularies = translator.src_vocab, translator.tgt_vocab
    untrained = book.Transformer(translator.model.config)
    blank = book.Translator(untrained, vocabularies, ("de", "en"))
    trained = book.alignment_accuracy(translator, pairs).max()
    assert trained > 0.75
    assert trained > 3 * book.alignment_accuracy(blank, pairs).max()


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
