"""Decoding: what is written, when it stops, and what it costs."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, UNK


def plain_greedy(model, row, extra):
    """One sentence, no batch, no tricks: the definition."""
    tgt = [BOS]
    with torch.no_grad():
        for _ in range(len(row) + extra):
            logits = model(torch.tensor([row]), torch.tensor([tgt]))[0, -1]
            logits[[PAD, BOS, UNK]] = -torch.inf
            word = int(logits.argmax())
            if word == EOS:
                break
            tgt.append(word)
    return tgt[1:]


def lively_model(seed, **changes):
    """Untrained, with weights so large that its outputs vary."""
    torch.manual_seed(seed)
    return book.restless_model(**changes)


def test_lively_models_write_sentences_of_many_lengths():
    outputs = []
    for seed in range(20):
        src = torch.randint(4, 14, (5, 4))
        outputs += book.greedy(lively_model(seed), src, 6)
    assert len(set(map(len, outputs))) > 8
    assert len(set(map(tuple, outputs))) > 60


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@pytest.mark.parametrize("greedy", [book.greedy, book.greedy_plain])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), lengths=LENGTHS)
def test_a_batch_is_decoded_like_each_sentence_alone(greedy, seed, lengths):
    model = lively_model(seed)
    rows = [torch.randint(4, 14, (n,)).tolist() for n in lengths]
    together = greedy(model, book.pad(rows), extra=6)
    assert together == [plain_greedy(model, row, 6) for row in rows]


# ------------------------------------------------- keys and values kept


HEADS = st.sampled_from([1, 4])  # for a wide head a Writer asks MKL


def caches(model):
    """The ways to begin a cache: the plain one, and the Writer's."""
    plain = functools.partial(book.Cache.begin, model)
    return [plain, book.Writer(model).begin]


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=LENGTHS,
    width=st.integers(1, 3),
    T=st.integers(1, 9),
    norm_first=st.booleans(),
    shared=st.booleans(),
    h=HEADS,
)
def test_cached_logits_are_those_of_the_whole_decoder(
    seed, lengths, width, T, norm_first, shared, h
):
    model = lively_model(seed, norm_first=norm_first, shared=shared, h=h)
    src = book.pad([torch.randint(4, 14, (n,)).tolist() for n in lengths])
    tgt = torch.randint(0, 14, (width * len(src), T))
    tgt[tgt == PAD] = UNK
    with torch.no_grad():
        whole = model(src.repeat_interleave(width, 0), tgt)
        for begin in caches(model):
            cache = begin(src, width)
            for t in range(T):
                torch.testing.assert_close(
                    cache.read(tgt[:, t]), whole[:, t], rtol=1e-4, atol=1e-4
                )


@pytest.mark.parametrize("number", [0, 1])
def test_a_text_may_outgrow_the_table_of_positions(number):
    """Word by word, where no long source has made the table longer."""

    def fresh():
        model = lively_model(0)
        model.position = book.PositionalEncoding(model.config).eval()
        return model

    model = fresh()
    start = len(model.position.table)
    src, tgt = torch.randint(4, 14, (1, 5)), torch.randint(4, 14, (1, 300))
    assert start < 300
    with torch.no_grad():
        cache = caches(model)[number](src)
        last = [cache.read(tgt[:, t]) for t in range(300)]
        whole = fresh()(src, tgt)
    for t in (start - 1, start, 299):
        torch.testing.assert_close(last[t], whole[:, t], rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), h=HEADS, data=st.data())
def test_texts_may_leave_the_cache_and_change_their_places(seed, h, data):
    model = lively_model(seed, h=h)
    src = book.pad([torch.randint(4, 14, (n,)).tolist() for n in (3, 7, 1)])
    tgt = torch.randint(4, 14, (6, 6))  # two texts for each source
    sources = data.draw(st.lists(st.sampled_from([0, 1, 2]), max_size=3,
                                 min_size=1, unique=True))  # fmt: skip
    places = st.lists(st.integers(0, 1), min_size=2, max_size=2)
    texts = [2 * i + k for i in sources for k in data.draw(places)]
    with torch.no_grad():
        rest = torch.randint(4, 14, (len(texts), 3))
        now = torch.cat([tgt[texts, :3], rest], dim=1)
        whole = model(src[sources].repeat_interleave(2, 0), now)
        for begin in caches(model):
            cache = begin(src, 2)
            for t in range(3):
                cache.read(tgt[:, t])
            cache.keep(torch.tensor(texts), torch.tensor(sources))
            for t in range(3, 6):
                torch.testing.assert_close(
                    cache.read(now[:, t]), whole[:, t], rtol=1e-4, atol=1e-4
                )


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=LENGTHS,
    width=st.integers(1, 4),
    h=HEADS,
    rows=st.sampled_from([1, 2, 5, 128]),
)
def test_a_writer_writes_what_the_plain_cache_writes(
    seed, lengths, width, h, rows
):
    """Sentences that end early leave; long ones outgrow the first room.

    However many texts are in a part of the logits.
    """
    model = lively_model(seed, norm_first=bool(seed % 2), h=h)
    src = book.pad([torch.randint(4, 14, (n,)).tolist() for n in lengths])
    writer = book.Writer(model)
    writer.rows, begin = rows, writer.begin
    assert book.greedy(model, src, 45, begin) == book.greedy(model, src, 45)
    how = {"width": width, "extra": 45, "first": False}
    plain = book.beam_search(model, src, **how)
    fast = book.beam_search(model, src, **how, begin=begin)
    for one, two in zip(plain, fast, strict=True):
        assert [h.tokens for h in one] == [h.tokens for h in two]
        for h, g in zip(one, two):
            assert math.isclose(h.score, g.score, rel_tol=1e-4)


@pytest.mark.parametrize("width, rows", [(1, 4), (3, 4), (3, 7), (3, 1)])
def test_a_writers_logits_come_in_parts_of_whole_sentences(width, rows):
    """None has more texts than asked for, but for those of one sentence."""
    model, src = lively_model(0), torch.randint(4, 14, (10, 6))
    writer = book.Writer(model)
    writer.rows = rows
    with torch.no_grad():
        for words in (
            torch.full((10 * width,), book.BOS),  # all alike, then not
            torch.randint(4, 14, (10 * width,)),
        ):
            whole, cut = (writer.begin(src, width) for _ in range(2))
            parts = cut.parts(words)
            assert cut.length == 1  # read, before any part is asked for
            parts = list(parts)
            sizes = [len(part) for part in parts]
            assert all(size % width == 0 for size in sizes)
            assert max(sizes) <= max(width, rows) and len(sizes) > 1
            torch.testing.assert_close(torch.cat(parts), whole.read(words))


@pytest.mark.parametrize("before", [0, 3])
def test_a_writer_reads_padding_wherever_it_stands(before):
    """Words keep their places, before which padding may stand."""
    model = lively_model(0)
    src = book.pad([[4, 9, 5, 7, book.EOS], [8, 6, book.EOS]])
    src = torch.nn.functional.pad(src, (before, 2), value=book.PAD)
    first = torch.tensor([book.BOS, book.BOS])
    with torch.no_grad():
        plain, fast = (begin(src).read(first) for begin in caches(model))
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries, keys", [(1, 5), (1, 40), (7, 7), (5, 23)])
def test_both_forms_of_a_writers_attention_are_attention(
    queries, keys, masked
):
    draw = functools.partial(torch.randn, dtype=torch.double)
    Q = draw(3, 2, queries, 32)
    K, V = draw(2, 3, 2, keys + 4, 32)[:, :, :, :keys]  # with room ahead
    mask = torch.rand(3, 1, 1, keys) < 0.7
    mask[..., 0], mask[0, ..., -1] = True, False  # some of both
    mask = mask if masked else torch.ones_like(mask)
    expected = book.attention(Q, K, V, mask)[0]
    added = book.additive(mask, Q)
    assert (added is not None) == masked
    found = book.attention_in_batches(Q, K, V, added)
    torch.testing.assert_close(found, expected)
    joined = book.joined_attention(Q, K, V, added)
    rows = expected.transpose(1, 2).reshape(3 * queries, 64)
    torch.testing.assert_close(joined, rows)


def test_a_writer_without_mkl_writes_the_same(monkeypatch):
    model = lively_model(3, h=1)
    src = torch.randint(4, 14, (5, 6))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    expected = book.greedy(model, src, 20, book.Writer(model).begin)
    monkeypatch.delattr(book, "attention_in_batches")
    with pytest.raises(NameError):  # so it was needed
        book.greedy(model, src, 20, book.Writer(model).begin)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert book.greedy(model, src, 20, book.Writer(model).begin) == expected


def test_a_writer_in_16_bits_is_close():
    model = lively_model(3)
    src, words = torch.randint(4, 14, (5, 6)), torch.full((5,), book.BOS)
    with torch.no_grad():
        whole = book.Writer(model).begin(src).read(words)
        half = book.Writer(model, torch.bfloat16).begin(src).read(words)
    assert 0 < (whole - half).norm() < 0.05 * whole.norm()


def test_a_writer_without_onednn_writes_the_same(monkeypatch):
    """On another device, or an older PyTorch, the plain product is used."""
    model, src = lively_model(3), torch.randint(4, 14, (5, 6))
    expected = book.greedy(model, src, 20, book.Writer(model).begin)
    monkeypatch.setattr(book.torch.ops, "mkldnn", object())
    writer = book.Writer(model)
    assert writer.logits.packed is None
    assert book.greedy(model, src, 20, writer.begin) == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 999), X=st.integers(1, 700), k=st.integers(1, 6))
def test_the_top_is_found_in_blocks_as_without(seed, X, k):
    torch.manual_seed(seed)
    scores, k = torch.randperm(3 * X).view(3, X).float(), min(k, X)
    scores[0, ::2] = -math.inf  # texts that have ended
    values, places = book.top(scores, k)
    assert values.equal(scores.topk(k).values)
    assert values.equal(scores.gather(1, places))
    assert all(len({*row}) == k for row in places.tolist())


@settings(max_examples=60, deadline=None)
@given(stay=st.lists(st.booleans(), min_size=1, max_size=20))
def test_who_stays_fills_the_holes_and_few_move(stay):
    stay = torch.tensor(stay)
    rows = book.close_ranks(stay)
    assert sorted(rows.tolist()) == stay.nonzero()[:, 0].tolist()
    left = len(rows)
    moved = int((rows != torch.arange(left)).sum())
    assert moved == int((~stay[:left]).sum())


def count_rows(module):
    """A list that grows by the shape of each of the module's inputs."""
    seen = []
    module.register_forward_pre_hook(
        lambda _, inputs: seen.append(tuple(inputs[0].shape))
    )
    return seen


def test_keys_and_values_of_the_source_are_computed_once():
    model = lively_model(1)
    seen = [
        count_rows(matrix)
        for layer in model.decoder.layers
        for matrix in (layer.cross_attention.W_K, layer.cross_attention.W_V)
    ]
    src = torch.randint(4, 14, (4, 5))
    outputs = book.greedy(model, src, extra=20)
    assert max(map(len, outputs)) > 5
    assert seen == [[(4, 5, 32)]] * 4  # two matrices in two layers


def test_each_word_goes_through_the_layers_once():
    model = lively_model(12)
    src = torch.randint(4, 14, (5, 4))
    outputs = book.greedy(model, src, extra=20)
    assert len(set(map(len, outputs))) > 2  # they end at different times
    seen = count_rows(model.decoder.layers[-1].feed_forward)
    assert book.greedy(model, src, extra=20) == outputs
    limit = 24
    steps = min(limit, 1 + max(map(len, outputs)))
    alive = [sum(len(o) >= t for o in outputs) for t in range(steps)]
    assert seen == [(rows, 1, 32) for rows in alive]


def test_the_order_of_words_does_not_depend_on_the_cache_of_another():
    model = lively_model(5)
    src = torch.randint(4, 14, (3, 4))
    first = book.greedy(model, src, 10)
    book.greedy(model, src.flip(0), 10)
    assert book.greedy(model, src, 10) == first


# ----------------------------------------------------------- when it stops


def scripted_model(lengths):
    """A model that writes sentence i with `lengths[i]` words, then EOS."""
    model = book.tiny_model().eval()
    calls = []

    def decode(tgt, memory, mask):
        calls.append(len(tgt))
        states = torch.zeros(*tgt.shape, 32)
        left = memory[:, 0, 0]  # the length that this row shall have
        states[:, -1, 0] = torch.where(tgt.size(1) > left, 1.0, -1.0)
        return states

    def encode(src):
        memory = torch.tensor(lengths).float()[:, None, None]
        return memory, src[:, None, None] != PAD

    with torch.no_grad():
        model.tgt_embedding.weight.zero_()
        model.tgt_embedding.weight[EOS, 0] = 1.0
        model.tgt_embedding.weight[7, 0] = -1.0
    model.decode, model.encode = decode, encode
    return model, calls


def test_each_sentence_stops_at_its_own_end():
    model, _ = scripted_model([3, 0, 5])
    outputs = book.greedy_plain(model, torch.full((3, 4), 9))
    assert outputs == [[7] * 3, [], [7] * 5]


def test_no_step_more_than_needed_and_ended_sentences_leave():
    model, calls = scripted_model([3, 0, 5])
    book.greedy_plain(model, torch.full((3, 4), 9))
    assert calls == [3, 2, 2, 2, 1, 1]  # five words and the end: six steps


def endless_model(word=7):
    """A model that writes the same word for ever."""
    model = book.tiny_model().eval()
    last = model.decoder.layers[-1].residuals[-1].norm
    with torch.no_grad():
        last.weight.zero_()  # then the norm's output is its bias
        last.bias.copy_(torch.eye(32)[0])
        model.tgt_embedding.weight[:, 0] = -9
        model.tgt_embedding.weight[word, 0] = 9
    return model


@pytest.mark.parametrize("greedy", [book.greedy, book.greedy_plain])
def test_an_endless_sentence_stops_at_source_plus_fifty(greedy):
    src = torch.tensor([[9, 9, 9, EOS], [9, EOS, PAD, PAD]])
    model = endless_model()
    seen = count_rows(model.decoder.layers[0].feed_forward)
    assert greedy(model, src) == [[7] * 54, [7] * 52]
    assert len(seen) == 54


@pytest.mark.parametrize("greedy", [book.greedy, book.greedy_plain])
def test_special_tokens_are_never_written(greedy):
    for seed in range(5):
        outputs = greedy(lively_model(seed), torch.full((4, 3), 9), 8)
        assert not {PAD, BOS, UNK, EOS} & {t for o in outputs for t in o}
    for word in (PAD, BOS, UNK):
        outputs = greedy(endless_model(word), torch.full((2, 3), 9), 8)
        assert not {PAD, BOS, UNK} & {t for o in outputs for t in o}


def test_decoding_needs_evaluation_mode_and_sees_to_it():
    torch.manual_seed(0)
    model = book.tiny_model(dropout=0.5)
    src = torch.randint(4, 14, (8, 6))
    model.eval()
    expected = book.greedy(model, src, 5)
    model.train()
    assert book.greedy(model, src, 5) == expected
    assert model.training  # as the caller left it


def test_evaluation_mode_is_put_back_after_an_error():
    model = book.tiny_model()
    try:
        with book.evaluating(model):
            assert not model.training
            raise KeyError
    except KeyError:
        pass
    assert model.training


def test_maps_are_kept_where_they_are_asked_for():
    """Those of a long text would take much memory."""
    model = book.tiny_model()
    src = torch.randint(4, 14, (2, 5))

    def kept():
        model(src, src)
        return {
            part.weights is not None
            for part in model.modules()
            if isinstance(part, book.MultiHeadAttention)
        }

    assert kept() == {False}  # in training
    with book.evaluating(model):
        assert kept() == {False}
        with book.evaluating(model, maps=True):
            assert kept() == {True}
        assert kept() == {False}
    book.greedy_plain(model, src, 2)
    book.perplexity(model, [([4, 5], [book.BOS, 6])])
    model.eval()
    assert kept() == {True}


def test_a_part_kept_in_evaluation_mode_stays_there():
    model = book.tiny_model()
    model.encoder.eval()
    with book.evaluating(model):
        assert not any(part.training for part in model.modules())
    assert model.training and model.decoder.training
    assert not any(part.training for part in model.encoder.modules())


def test_with_many_weights_torch_attends_and_keeps_none(monkeypatch):
    """Those of one text of 8,000 tokens took two gigabytes."""
    torch.manual_seed(0)
    Q, K, V = torch.randn(3, 1, 1, 1100, 8)
    mask = torch.zeros(1, 1, 1, 1100)
    mask[..., 1000:] = -math.inf
    expected = book.attention_in_batches(Q, K, V, mask)

    def unasked(*inputs):
        pytest.fail("it would keep 1,100 · 1,100 weights")

    monkeypatch.setattr(book, "attention_in_batches", unasked)
    found = book.joined_attention(Q, K, V, mask)
    torch.testing.assert_close(found, expected[0, 0])


@pytest.mark.parametrize("beam", [1, 4, 32, 100, 10_000])
def test_wide_beams_have_fewer_sources(beam):
    assert 1 <= book.beam_room(beam) and book.beam_room(beam) * beam <= 1e4


def test_an_empty_batch_gives_nothing():
    model = book.tiny_model().eval()
    for begin in caches(model):
        assert book.greedy(model, torch.zeros(0, 3).long(), 5, begin) == []


def test_sentences_of_nothing_but_padding_disturb_no_others():
    model = lively_model(0)
    src = book.pad([[4, 9, 5, 7, book.EOS]] * 64 + [[book.PAD]] * 3)
    for begin in caches(model):
        outputs = book.greedy(model, src, 5, begin)
        alone = book.greedy(model, src[:1], 5, begin)
        assert len(outputs) == 67 and outputs[:64] == alone * 64
        assert book.UNK not in outputs[66]
        outputs = book.beam_search(model, src, 2, 0.6, 5, begin)
        assert outputs[0][0].tokens == outputs[63][0].tokens


# ------------------------------------- beam search, see also test_beam.py


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 99),
    lengths=LENGTHS,
    width=st.integers(2, 5),
    alpha=st.sampled_from([0.0, 0.6, 1.0]),
)
def test_stopping_early_finds_the_same_best(seed, lengths, width, alpha):
    model = lively_model(seed)
    src = book.pad([torch.randint(4, 14, (n,)).tolist() for n in lengths])
    how = dict(width=width, alpha=alpha, extra=6)
    early = book.beam_search(model, src, **how)
    late = book.beam_search(model, src, first=False, **how)
    for one, all_ in zip(early, late, strict=True):
        assert math.isclose(one[0].score, all_[0].score, rel_tol=1e-4)
        assert one[0].tokens == all_[0].tokens
        scores = [h.score for h in all_]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(h.tokens) for h in all_}) == len(all_) == width


def test_a_longer_translation_may_still_win():
    """Its end is worse than the first one's as a sum, better as a score."""
    first, middle, last = {EOS: 0.55, 7: 0.45}, {7: 0.99, EOS: 0.01}, {EOS: 1}
    steps = iter([first, *[middle] * 4, *[last] * 50])

    def logits(states):
        table = torch.full((len(states), 14), -30.0)
        for word, probability in next(steps).items():
            table[:, word] = math.log(probability)
        return table

    model = book.tiny_model().eval()
    model.tgt_embedding.logits = logits
    [found] = book.beam_search(model, torch.full((1, 9), 9), width=2)
    assert found[0].tokens == [7] * 5
    total = math.log(0.45) + 4 * math.log(0.99)
    assert math.isclose(found[0].log_prob, total, rel_tol=1e-4)
    assert math.isclose(found[0].score, total / (11 / 6) ** 0.6, rel_tol=1e-4)


def test_a_beam_stops_at_source_plus_fifty_and_writes_no_specials():
    src = torch.tensor([[9, 9, 9, EOS], [9, EOS, PAD, PAD]])
    found = book.beam_search(endless_model(), src, first=False)
    for hypotheses, limit in zip(found, (54, 52)):
        assert max(len(h.tokens) for h in hypotheses) == limit
        words = {token for h in hypotheses for token in h.tokens}
        assert not {PAD, BOS, UNK, EOS} & words


def test_translating_leaves_the_random_numbers_alone():
    pairs = [(pair.de, pair.en) for pair in book.toy_corpus()["test"][:60]]
    sizes = dict(N=1, d_model=16, d_ff=16, h=2)
    translator = book.untrained_translator(
        pairs, ("de", "en"), sizes, pieces=200
    )
    before, texts = torch.get_rng_state(), [de for de, _ in pairs[:3]]
    for beam in (1, 2):
        translator.translate(texts, beam)
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize("width", [0, -1])
def test_a_beam_without_a_place_is_refused(width):
    model, src = lively_model(0), torch.randint(4, 14, (2, 4))
    with pytest.raises(book.InputError, match="at least 1"):
        book.beam_search(model, src, width)


@pytest.mark.parametrize("alpha", [math.nan, -0.1, 2000])
def test_a_power_that_is_none_is_refused(alpha):
    model, src = lively_model(0), torch.randint(4, 14, (2, 4))
    with pytest.raises(book.InputError, match="from 0 to 20"):
        book.beam_search(model, src, 2, alpha)


def test_sizes_and_updates_are_whole_numbers():
    for make in (
        lambda: book.Recipe(steps=2e3), lambda: book.Config(N=2.0),
        lambda: book.Recipe(max_tokens=512.0),
    ):  # fmt: skip
        with pytest.raises(book.InputError, match="whole number"):
            make()


def test_a_writer_may_be_more_exact_than_the_weights():
    translator = book.load_translator(book.published_model())
    usual = translator.translate(["Ein Hund rennt über die Wiese."], 4)
    translator.kind = torch.double
    text = ["Ein Hund rennt über die Wiese."]
    assert translator.translate(text, 4) == usual
