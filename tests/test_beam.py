"""Beam search: what it finds, what it scores, and when it stops."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers import writers_made
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, UNK

lengths = st.lists(st.integers(1, 9), min_size=1, max_size=5)
seeds = st.integers(0, 999)


def sources(seed, lengths):
    torch.manual_seed(seed)
    model = book.restless_model()
    return model, [torch.randint(4, 14, (n,)).tolist() for n in lengths]


@settings(max_examples=20, deadline=None)
@given(seed=seeds, lengths=lengths)
def test_a_beam_of_one_is_greedy(seed, lengths):
    model, rows = sources(seed, lengths)
    found = book.beam_search(model, book.pad(rows), width=1, extra=6)
    assert [h[0].tokens for h in found] == book.greedy(
        model, book.pad(rows), extra=6
    )


@settings(max_examples=15, deadline=None)
@given(
    seed=seeds,
    lengths=lengths,
    width=st.integers(1, 6),
    alpha=st.sampled_from([0.0, 0.6, 1.5]),
)
def test_the_batched_search_finds_what_the_plain_one_does(
    seed, lengths, width, alpha
):
    """Two programs that share nothing but the model and the penalty."""
    model, rows = sources(seed, lengths)
    options = dict(width=width, alpha=alpha, extra=4)
    found = book.beam_search(model, book.pad(rows), first=False, **options)
    for row, some in zip(rows, found):
        plain = book.beam_search_plain(model, torch.tensor([row]), **options)
        assert [h.tokens for h in some] == [h.tokens for h in plain]
        for one, other in zip(some, plain):
            assert math.isclose(one.score, other.score, rel_tol=1e-4)
            assert math.isclose(one.log_prob, other.log_prob, rel_tol=1e-4)


@settings(max_examples=10, deadline=None)
@given(seed=seeds, alpha=st.sampled_from([0.0, 0.6, 1.0]))
def test_a_beam_for_everything_finds_the_best_of_all(seed, alpha):
    torch.manual_seed(seed)
    model = book.restless_model(src_vocab=6, tgt_vocab=6)
    src, best = torch.tensor([[4, 5]]), (-math.inf, None)
    for length in range(4):
        for tokens in itertools.product((4, 5), repeat=length):
            total = book.log_probability(model, src, tokens)
            score = total / book.length_penalty(length + 1, alpha)
            best = max(best, (score, [*tokens]))
    for first in (False, True):
        [found] = book.beam_search(
            model, src, width=15, alpha=alpha, extra=1, first=first
        )
        assert found[0].tokens == best[1]
        assert math.isclose(found[0].score, best[0], rel_tol=1e-4)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, lengths=lengths, width=st.integers(2, 6))
def test_company_and_padding_change_nothing(seed, lengths, width):
    model, rows = sources(seed, lengths)
    options = dict(width=width, extra=4, first=False)
    together = book.beam_search(model, book.pad(rows), **options)
    for row, found in zip(rows, together):
        wider = torch.tensor([[*row, PAD, PAD]])
        [alone] = book.beam_search(model, wider, **options)
        assert [h.tokens for h in found] == [h.tokens for h in alone]


@settings(max_examples=15, deadline=None)
@given(seed=seeds, lengths=lengths, width=st.integers(1, 5))
def test_each_score_is_the_models_own(seed, lengths, width):
    model, rows = sources(seed, lengths)
    found = book.beam_search(
        model, book.pad(rows), width, extra=4, first=False
    )
    for row, hypotheses in zip(rows, found):
        assert len(hypotheses) == width
        assert len({tuple(h.tokens) for h in hypotheses}) == width
        scores = [h.score for h in hypotheses]
        assert scores == sorted(scores, reverse=True)
        for h in hypotheses:
            own = book.log_probability(model, book.pad([row]), h.tokens)
            assert math.isclose(h.log_prob, own, rel_tol=1e-3, abs_tol=1e-4)
            lp = ((5 + len(h.tokens) + 1) / 6) ** 0.6
            assert math.isclose(h.score, h.log_prob / lp, rel_tol=1e-5)
            assert len(h.tokens) <= len(row) + 4
            assert not {PAD, BOS, EOS, UNK} & {*h.tokens}


@settings(max_examples=25, deadline=None)
@given(seed=seeds, lengths=lengths, width=st.integers(2, 6))
def test_stopping_early_loses_nothing(seed, lengths, width):
    model, rows = sources(seed, lengths)
    src = book.pad(rows)
    late = book.beam_search(model, src, width, extra=8, first=False)
    early = book.beam_search(model, src, width, extra=8)
    for one, other in zip(early, late):  # batches round in their own way
        assert math.isclose(one[0].score, other[0].score, rel_tol=1e-5)


def test_stopping_early_saves_steps(monkeypatch):
    """A model sure of the end after one word needs no fifty steps."""
    model, steps = book.tiny_model().eval(), []
    with torch.no_grad():
        model.tgt_embedding.weight.zero_()
        model.tgt_embedding.weight[7, 0] = 1.0
        model.tgt_embedding.weight[EOS, 1] = 1.0
        model.tgt_embedding.weight[8, 1] = 0.9

    def read(cache, words):
        steps.append(len(words))
        cache.length += 1
        state = torch.zeros(len(words), 32)
        state[:, 0 if cache.length == 1 else 1] = 12.0
        return model.tgt_embedding.logits(state)

    monkeypatch.setattr(book.Cache, "read", read)
    monkeypatch.setattr(book.Cache, "keep", lambda *_: None)
    src = torch.tensor([[9, EOS]])
    [found] = book.beam_search(model, src, width=3)
    assert found[0].tokens == [7]
    assert len(steps) == 2
    steps.clear()
    book.beam_search(model, src, width=3, first=False)
    assert len(steps) > 2


@pytest.mark.parametrize("kind", ["plain", "writer"])
@pytest.mark.parametrize("first", [True, False])
def test_a_source_whose_beam_has_ended_takes_no_more_rows(kind, first):
    """In company it costs the steps that it costs alone."""
    torch.manual_seed(12)
    model, rows = book.restless_model(), []
    src = torch.randint(4, 14, (8, 4))
    begin = partial(book.Cache.begin, model)
    begin = book.Writer(model).begin if kind == "writer" else begin

    def counted(*arguments):
        cache = begin(*arguments)
        parts = cache.parts

        def noted(words):
            rows.append(len(words))
            return parts(words)

        cache.parts = noted
        return cache

    how = dict(width=3, extra=12, first=first, begin=counted)
    book.beam_search(model, src, **how)
    together, alone = rows[:], []
    for row in src:
        rows.clear()
        book.beam_search(model, row[None], **how)
        alone.append(len(rows))
    assert len(set(alone)) > 2
    assert together == [
        3 * sum(steps > step for steps in alone) for step in range(max(alone))
    ]


def test_a_wider_beam_finds_no_less_likely_sentence():
    gains = 0
    for seed in range(8):
        model, rows = sources(seed, [5, 7])
        score = {}
        for width in (1, 64):
            found = book.beam_search(model, book.pad(rows), width, 0.0, 3)
            score[width] = [h[0].score for h in found]
        for narrow, wide in zip(score[1], score[64]):
            assert wide >= narrow - 1e-4
            gains += wide > narrow + 1e-3
    assert gains  # and sometimes a better one


def test_the_translator_gives_n_best_texts_in_order():
    translator = book.Translator(
        book.restless_model(),
        [book.Vocabulary(book.DIGITS)] * 2,
        ("en", "en"),
    )
    texts = ["7 1 9 2 0", "", "4 4"]
    found = translator.best(texts, beam=3)
    assert [len(h) for h in found] == [3, 1, 3]
    assert found[1] == [(0.0, "")]
    best = [h[0][1] for h in found]
    assert best == translator.translate(texts, beam=3)
    assert translator.translate(texts, beam=1) == translator.translate(texts)


@pytest.mark.parametrize("length", [1, 7, 55])
def test_the_length_penalty_is_that_of_wu(length):
    assert book.length_penalty(1) == 1.0
    expected = (5 + length) ** 0.6 / (5 + 1) ** 0.6
    assert math.isclose(book.length_penalty(length, 0.6), expected)
    assert book.length_penalty(length, 0.0) == 1.0


def test_bleu_knows_its_extremes():
    text = "a man sleeps on a green couch today .".split()
    assert book.bleu_by_hand([text], [text]) == (100, [100.0] * 4, 1.0)
    half = [text[:6]]
    score, precisions, penalty = book.bleu_by_hand(half, [text])
    assert precisions == [100.0] * 4
    assert math.isclose(penalty, math.exp(1 - 9 / 6))
    assert math.isclose(score, 100 * penalty)
    assert book.bleu_by_hand([[]], [text]) == (0, [0.0] * 4, 0.0)
    _, [first, *_], _ = book.bleu_by_hand([["a"] * 9], [text])
    assert math.isclose(first, 100 * 2 / 9)  # clipped at the reference's two


def test_bleu_is_of_as_many_outputs_as_references():
    text = "a man sleeps on a green couch today .".split()
    with pytest.raises(ValueError, match="longer"):
        book.bleu_by_hand([text], [text, text])


def test_a_penalty_that_falls_with_length_is_refused():
    """With it the first to end would be taken for the best."""
    model, rows = sources(0, [3])
    with pytest.raises(book.InputError, match="alpha is -1"):
        book.beam_search(model, book.pad(rows), alpha=-1)


@pytest.mark.parametrize(
    "language", ["zh", "zh-TW", "ja", "th", "km_KH", "jp", "cn"]
)
def test_without_spaces_letters_count(language):
    """Else each sentence is one word: nearly right is as bad as wrong."""
    text = ["\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002"]
    near = [text[0].replace("\u5f88", "\u771f")]
    far = ["\u72d7\u5728\u516c\u56ed\u91cc\u8dd1\u3002"]
    scores = [
        book.bleu(output, text, language=language).score
        for output in (text, near, far)
    ]
    assert scores[0] > 99.9 and 20 < scores[1] < 80 and scores[2] < 10
    assert book.bleu(near, text).score == book.bleu(far, text).score == 0
    signature = book.bleu(near, text, language=language).signature
    assert "tok:zh" in signature or "tok:char" in signature


def test_what_can_be_read_only_once_is_translated():
    """Such as the lines of a file."""
    words = book.Vocabulary(book.DIGITS)
    made = book.Translator(book.tiny_model(), [words] * 2, ("en", "en"))
    texts = ["7 1", "4 4 3"]
    assert made.translate(iter(texts)) == made.translate(texts)
    assert made.best(iter(texts), 2) == made.best(texts, 2)
    with pytest.raises(book.InputError, match="text 2 is no text.* NoneType"):
        made.translate(["7", None])


@pytest.mark.parametrize(
    "rows, width", [(["12", "45"], 2), (["12", "456"], 2), (["12"], 0)]
)
def test_the_plain_beam_refuses_what_it_would_not_do(rows, width):
    src = book.pad([book.digits(row) for row in rows])
    with pytest.raises(book.InputError, match="one source without padding"):
        book.beam_search_plain(book.tiny_model(), src, width=width, extra=1)


def test_blocks_of_ready_may_end_in_any_order():
    """As those of two threads do; after the last nothing is kept."""
    words = book.Vocabulary(book.DIGITS)
    translator = book.Translator(
        book.tiny_model(), [words] * 2, ("en", "en"), both=True
    )
    one, two = translator.ready(), translator.ready()
    one.__enter__(), two.__enter__()
    back = translator.reversed()
    one.__exit__(None, None, None)
    assert translator.kept
    two.__exit__(None, None, None)
    assert not translator.kept and not back.kept
    with pytest.raises(KeyError), translator.ready():
        raise KeyError
    assert not translator.kept


def test_inside_of_ready_one_writer_serves_all_calls(monkeypatch):
    made = writers_made(monkeypatch)
    translator = book.load_translator(book.published_model())
    texts = ["Ein Hund rennt.", "Eine Frau liest.", "Ein Kind isst Eis."]
    right = translator.translate(texts), translator.best(texts, 2)
    assert len(made) == 2 and len(set(right[0])) > 1
    with translator.ready() as same:
        assert same is translator
        assert translator.translate(texts) == right[0]
        with translator.ready():
            assert translator.best(texts, 2) == right[1]
        assert translator.translate(texts[0]) == right[0][0]
    assert len(made) == 3
    with pytest.raises(KeyError), translator.ready():
        raise KeyError
    with torch.no_grad():  # outside again, changed weights count
        translator.model.tgt_embedding.weight.normal_()
    assert translator.translate(texts) != right[0]


def test_inside_of_ready_a_form_of_ones_own_serves_too():
    class Own(book.Translator):
        asked = 0

        def begin(self):
            self.asked += 1
            return partial(book.Cache.begin, self.model)

    words = [book.Vocabulary(book.DIGITS)] * 2
    own = Own(book.restless_model(), words, ("a", "b"))
    with own.ready():
        assert own.translate("7 1") == own.translate(["7 1"])[0]
    assert own.asked == 1


@pytest.mark.parametrize("language", ["ko", "de", "fr", "vi"])
def test_with_spaces_words_count(language):
    score = book.bleu(["ein Hund"], ["ein Hund"], language=language)
    assert "tok:13a" in score.signature


def test_measures_count_letters_where_the_target_has_no_spaces():
    vocabulary = book.Vocabulary(book.DIGITS)
    translator = book.Translator(
        book.tiny_model(), [vocabulary] * 2, ("en", "zh")
    )
    facts, _ = book.measure(translator, [("7 1 9", "7 1 9")], beam=1)
    assert "tok:zh" in facts["signature"]
    assert "tok:zh" in facts["signature_cased"]
    other = book.Translator(book.tiny_model(), [vocabulary] * 2, ("zh", "en"))
    back, _ = book.measure(other, [("7", "7")], beam=1)
    assert "tok:13a" in back["signature"]


def test_measures_agree_with_sacrebleu_and_the_cross_entropy():
    import torch.nn.functional as F
    from sacrebleu.metrics import BLEU, CHRF

    model = book.tiny_model()
    vocabulary = book.Vocabulary(book.DIGITS)
    translator = book.Translator(model, [vocabulary] * 2, ("en", "en"))
    pairs = [("7 1 9 2 0", "7 1 9 2 0"), ("4 4 3 2 1", "4 4 3 2 2")]
    facts, outputs = book.measure(translator, pairs, beam=2)
    references = [[reference for _, reference in pairs]]
    lower = BLEU(lowercase=True, force=True)
    score = lower.corpus_score(outputs, references)
    assert math.isclose(facts["bleu"], score.score, abs_tol=0.01)
    assert facts["signature"] == str(lower.get_signature())
    assert "case:lc" in facts["signature"]
    assert "case:mixed" in facts["signature_cased"]
    assert math.isclose(facts["cumulative"][3], facts["bleu"], abs_tol=0.06)
    chrf = CHRF().corpus_score(outputs, references).score
    assert math.isclose(facts["chrf"], chrf, abs_tol=0.01)
    losses = []
    model.eval()
    for pair in pairs:
        src, tgt = map(torch.tensor, translator.encode_texts(*pair))
        logits = model(src[None], tgt[None, :-1])[0]
        losses.append(F.cross_entropy(logits, tgt[1:]))
    loss = float(torch.stack(losses).mean().detach())
    assert math.isclose(facts["loss"], loss, abs_tol=1e-3)
    assert facts["parameters"] == book.parameter_count(model)
    assert math.isclose(
        facts["megabytes"], 4 * facts["parameters"] / 1e6, abs_tol=0.01
    )


def test_perplexity_makes_few_logits_at_once(monkeypatch):
    """And none where there is padding."""
    model, made = book.tiny_model(), []
    logits = book.Embedding.logits

    def watched(self, states):
        made.append(states.shape[0])
        return logits(self, states)

    monkeypatch.setattr(book.Embedding, "logits", watched)
    pairs = [([4, 5], [book.BOS, *[6] * n]) for n in (300, 200, 7)]
    book.perplexity(model, pairs)
    assert sum(made) == 507 and max(made) <= 256


def test_measures_show_the_parts_of_bleu(monkeypatch):
    """Of texts with large letters, too short, and right in part."""
    from sacrebleu.metrics import BLEU

    vocabulary = book.Vocabulary(book.DIGITS)
    translator = book.Translator(
        book.tiny_model(), [vocabulary] * 2, ("en", "en")
    )
    texts = ["a man sleeps on a couch .", "two dogs in the snow ."]
    monkeypatch.setattr(translator, "translate", lambda *_: texts)
    pairs = [
        ("1", "a man sleeps on a green couch today ."),
        ("2", "Two dogs play in the snow ."),
    ]
    facts, outputs = book.measure(translator, pairs, beam=1)
    assert outputs == texts
    references = [[reference for _, reference in pairs]]
    lower = BLEU(lowercase=True, force=True)
    score = lower.corpus_score(outputs, references)
    assert 0 < score.bp < 0.9
    assert facts["precisions"] == [round(p, 1) for p in score.precisions]
    assert math.isclose(facts["brevity_penalty"], score.bp, abs_tol=1e-4)
    for n in range(1, 5):
        part = BLEU(lowercase=True, force=True, max_ngram_order=n)
        part = part.corpus_score(outputs, references).score
        assert math.isclose(facts["cumulative"][n - 1], part, abs_tol=0.06)
    cased = BLEU(force=True).corpus_score(outputs, references).score
    assert math.isclose(facts["bleu_cased"], cased, abs_tol=0.01)
    assert facts["bleu_cased"] < facts["bleu"]


def test_a_beam_adds_up_in_32_bits_what_the_model_gives_in_16():
    torch.manual_seed(0)
    model = book.restless_model().bfloat16()
    src = torch.randint(4, 14, (1, 9))
    [found] = book.beam_search(model, src, width=4, extra=20)
    for h in found:
        tgt = torch.tensor([[BOS, *h.tokens, EOS]])
        with book.evaluating(model):
            logits = model(src, tgt[:, :-1]).float()
        words = logits.log_softmax(-1).gather(-1, tgt[:, 1:, None])
        own = float(words.sum())
        assert math.isclose(h.log_prob, own, rel_tol=2e-3)


@pytest.mark.parametrize("first", [True, False])
def test_a_model_of_nan_is_an_error_and_no_empty_text(first):
    model = book.tiny_model()
    model.src_embedding.weight.data[9] = math.nan
    src = torch.tensor([[9, EOS]])
    with pytest.raises(book.InputError, match="not a number"):
        book.beam_search(model, src, width=4, first=first)
    with pytest.raises(book.InputError, match="restore its weights.pt"):
        book.greedy(model, src)


@pytest.mark.parametrize("value", [math.nan, 1e30])
def test_a_model_of_nan_is_not_called_a_changed_one(tmp_path, value):
    """By a Translator, which takes a Writer, and where it is saved."""
    translator = book.load_translator(book.published_model())
    layer = translator.model.encoder.layers[0].feed_forward
    layer.W_1.weight.data[3, 5] = value
    for use in (
        lambda: translator.translate(["Ein Hund rennt."], 1),
        lambda: book.save_translator(translator, tmp_path / "out"),
    ):
        with pytest.raises(book.InputError, match="restore its weights.pt"):
            use()
