"""Word pieces: what is cut comes back, whatever the language."""

import hashlib
import json
import math
import random
import re
import subprocess
import sys
import types
import unicodedata
from collections import Counter

import pytest
import torch
from helpers import ONE_THREAD, SCRIPT
from hypothesis import given, settings
from hypothesis import strategies as st

import annotated_transformer as book
from annotated_transformer import EOS, UNK, InputError

SIZES = dict(N=1, d_model=8, d_ff=8, h=1)
GERMAN = [(pair.de, pair.en) for pair in book.toy_corpus()["train"][:400]]
KOREAN = [
    ("저는 학생입니다.", "I am a student."),
    ("오늘은 날씨가 좋습니다!", "The weather is good today!"),
    ("고양이가 물을 마십니다.", "The cat drinks water."),
    ("그 사람은 책을 읽고 있습니다.", "That person is reading a book."),
    ("우리는 내일 서울에 갑니다.", "We go to Seoul tomorrow."),
]


def untrained(pairs, languages=("de", "en"), size=200, **how):
    return book.untrained_translator(
        pairs, languages, SIZES, pieces=size, **how
    )


@pytest.fixture(scope="module")
def german():
    return untrained(GERMAN)


# ------------------------------------------------- the algorithm, by hand

WORDS = st.dictionaries(
    st.text("abcß가", min_size=1, max_size=7),
    st.integers(1, 9),
    min_size=1,
    max_size=8,
)


def most_frequent_pairs(counts, merges):
    """The best pairs after these merges, counted in plain strings."""
    pairs = Counter()
    for word, count in counts.items():
        split = book.split_word(word, merges)
        for i in range(len(split) - 1):
            pairs[split[i], split[i + 1]] += count
    most = max(pairs.values(), default=0)
    return {pair for pair, count in pairs.items() if count == most}


@settings(max_examples=100, deadline=None)
@given(counts=WORDS, number=st.integers(0, 12))
def test_each_merge_is_the_most_frequent_pair(counts, number):
    merges = book.learn_merges(counts, number)
    for n, pair in enumerate(merges):
        assert pair in most_frequent_pairs(counts, merges[:n])
    if len(merges) < number:  # only because nothing is left to merge
        assert not most_frequent_pairs(counts, merges)


@settings(max_examples=100, deadline=None)
@given(counts=WORDS, word=st.text(max_size=12))
def test_any_word_comes_back_from_its_pieces(counts, word):
    merges = book.learn_merges(counts, 9)
    assert "".join(book.split_word(word, merges)) == "▁" + word


@settings(max_examples=50, deadline=None)
@given(counts=WORDS, draw=st.randoms(use_true_random=False))
def test_the_order_of_the_words_does_not_matter(counts, draw):
    shuffled = list(counts.items())
    draw.shuffle(shuffled)
    merges = book.learn_merges(counts, 9)
    assert book.learn_merges(dict(shuffled), 9) == merges


@settings(max_examples=50, deadline=None)
@given(counts=WORDS)
def test_with_all_merges_each_known_word_is_one_piece(counts):
    merges = book.learn_merges(counts, 10_000)
    for word in counts:
        assert book.split_word(word, merges) == ["▁" + word]


def test_a_pair_that_overlaps_itself_is_joined_from_the_left():
    assert book.join_pair(list("aaa"), ("a", "a")) == ["aa", "a"]
    assert book.join_pair(list("aaaa"), ("a", "a")) == ["aa", "aa"]
    assert book.join_pair([], ("a", "a")) == []


# --------------------------------------------------------- the library's


def round_trip(vocabulary, text):
    ids = vocabulary.encode(vocabulary.split(text))
    assert ids[-1] == EOS and UNK not in ids
    return vocabulary.join(vocabulary.decode(ids[:-1]))


@pytest.mark.parametrize(
    "pairs, languages",
    [(GERMAN, ("de", "en")), (KOREAN, ("ko", "en"))],
    ids=["de-en", "ko-en"],
)
def test_text_comes_back_in_both_languages(pairs, languages):
    translator = untrained(pairs, languages, 120)
    assert translator.src_vocab is translator.tgt_vocab
    for pair in pairs:
        for text in pair:
            assert round_trip(translator.src_vocab, text) == text


def test_white_space_is_made_regular(german):
    spaced = "  der  Mann\u3000isst\tdas\u00a0Ei . "
    assert round_trip(german.src_vocab, spaced) == "der Mann isst das Ei ."
    for empty in ("", "   ", "\t"):
        assert german.src_vocab.split(empty) == []


LETTERS = sorted({c for pair in GERMAN for text in pair for c in text} - {" "})


@settings(max_examples=200, deadline=None)
@given(words=st.lists(st.text(LETTERS, min_size=1, max_size=8), max_size=6))
def test_any_words_of_known_letters_come_back(german, words):
    assert round_trip(german.src_vocab, " ".join(words)) == " ".join(words)


@settings(max_examples=200, deadline=None)
@given(known=st.text(LETTERS, max_size=6), strange=st.sampled_from("ж한ﾊ7♞"))
def test_strange_letters_become_unk_and_nothing_else_does(
    german, known, strange
):
    vocabulary = german.src_vocab
    ids = vocabulary.encode(vocabulary.split(f"{known}{strange}{known}"))
    assert ids.count(UNK) == 1 and ids[-1] == EOS
    assert UNK not in vocabulary.encode(vocabulary.split(known))


@pytest.mark.parametrize("text", ["<pad> <s> </s> <unk>", "<2en> ja", "▁"])
def test_text_that_looks_like_a_special_token_is_none(text):
    translator = untrained(GERMAN + [(text, text)] * 9, both=True)
    vocabulary = translator.src_vocab
    special = {
        vocabulary.processor.piece_to_id(f"<2{t}>") for t in ("de", "en")
    }
    special |= {book.PAD, book.BOS, book.EOS}
    assert not special & set(vocabulary.encode(vocabulary.split(text))[:-1])


@pytest.mark.parametrize("name", book.SPECIALS)
def test_letters_that_are_strange_do_not_spell_a_special_token(name):
    """Pieces joins what it does not know, so that the name stays whole."""
    pairs = [("жук летит", "дом стоит"), ("дом летит", "жук стоит")] * 9
    translator = untrained(pairs, size=30)
    vocabulary, text = translator.src_vocab, f"жук {name} дом"
    assert not set(name) & set("".join(vocabulary.decode(range(4, 30))))
    assert name in vocabulary.split(text)
    ids = vocabulary.encode(vocabulary.split(text))
    assert book.UNK in ids and ids[-1] == book.EOS
    assert not {book.PAD, book.BOS, book.EOS} & set(ids[:-1])
    packed = book.pack(translator, [(text, text)])
    assert list(packed) == book.encode_all(translator, [(text, text)])
    assert set(name) <= packed.unknown.keys()


@pytest.mark.parametrize("size", [1, 4, 30, 100_000, 10**11])
def test_a_size_that_does_not_fit_is_named(size):
    with pytest.raises(InputError, match="--pieces") as caught:
        untrained(GERMAN, size=size)
    assert f"{size:,} word pieces" in str(caught.value)


@pytest.mark.parametrize("size", [30, 100_000])
def test_a_size_that_fits_is_told(size):
    with pytest.raises(InputError) as caught:
        untrained(GERMAN, size=size)
    told = re.search(r"a number (<=|>=) (\d+)", str(caught.value))
    fits, beyond = int(told[2]), 1 if told[1] == "<=" else -1
    assert len(untrained(GERMAN, size=fits).src_vocab) == fits
    with pytest.raises(InputError):
        untrained(GERMAN, size=fits + beyond)


def test_one_vocabulary_and_one_matrix_for_both_sides(german):
    config = german.model.config
    assert len(german.src_vocab) == config.src_vocab == config.tgt_vocab == 200
    model = german.model
    assert model.src_embedding.weight is model.tgt_embedding.weight


def test_the_same_text_makes_the_same_vocabulary(german):
    assert untrained(GERMAN).src_vocab.model == german.src_vocab.model


def test_special_tokens_are_where_the_model_expects_them(german):
    assert german.src_vocab.decode([0, 1, 2, 3]) == book.SPECIALS
    assert len(german.src_vocab.encode([])) == 1


def test_real_korean_comes_back(data):
    pairs = book.corpus_part(str(data / "ko-en"), "train", "ko", "en")[:2000]
    translator = untrained(pairs, ("ko", "en"), 3000)
    vocabulary = translator.src_vocab
    for pair in pairs:
        for text in pair:
            plain = " ".join(unicodedata.normalize("NFKC", text).split())
            assert round_trip(vocabulary, text) == plain


# ---------------------------------------------------- both directions, tags


def test_a_tag_says_which_language_is_wanted():
    there = untrained(GERMAN, both=True)
    back = there.reversed()
    vocabulary = there.src_vocab
    for translator, tag in ((there, "<2en>"), (back, "<2de>")):
        first, *rest = translator.split("ja ja")
        assert first == tag
        assert rest == vocabulary.split("ja ja")
        src, tgt = translator.encode_texts("ja", "nein")
        assert src[0] == vocabulary.processor.piece_to_id(tag) > UNK
        assert tgt == [book.BOS, *vocabulary.encode(vocabulary.split("nein"))]
    assert back.model is there.model
    assert (back.src, back.tgt) == ("en", "de")


def test_a_model_of_one_direction_has_no_tags(german):
    assert german.split("ja") == german.src_vocab.split("ja")
    assert german.src_vocab.processor.piece_to_id("<2en>") == UNK


def test_a_model_of_one_direction_cannot_be_reversed(german):
    with pytest.raises(book.InputError, match="one direction, de to en.*both"):
        german.reversed()


def test_the_other_direction_is_of_the_same_class_and_writes_as_that():
    class Own(book.Translator):
        def begin(self):
            return "own"

    model = untrained(KOREAN * 30, ("ko", "en"), 120, both=True)
    vocabularies = model.src_vocab, model.tgt_vocab
    there = Own(model.model, vocabularies, ("ko", "en"), both=True)
    there.kind = torch.bfloat16
    back = there.reversed()
    assert back.begin() == "own" and back.kind is torch.bfloat16
    assert (back.src, back.tgt) == ("en", "ko")
    assert (there.src, there.tgt) == ("ko", "en")
    again = back.reversed()
    assert (again.src, again.tgt) == ("ko", "en")


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_pieces_of_no_text_are_refused(texts):
    with pytest.raises(book.InputError, match="no text to learn"):
        book.Pieces.learn(texts, 100)


@pytest.mark.parametrize("read", [0, 1, 40])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), InputError("line 3: not UTF-8"), OSError(5, "I/O")],
    ids=repr,
)
def test_what_is_wrong_with_the_texts_is_not_blamed_on_the_pieces(error, read):
    """sentencepiece gives all that is raised while it reads a name of its own;
    so Ctrl-C would not stop it."""

    def texts():
        yield from ["ein Hund läuft", "zwei Hunde laufen"] * (read // 2)
        raise error

    with pytest.raises(type(error)) as found:
        book.Pieces.learn(texts(), 40)
    assert found.value is error


@pytest.mark.parametrize("wish", ["both", "lowercase"])
def test_what_needs_pieces_says_how_to_get_them(wish):
    with pytest.raises(book.InputError, match="--pieces 5000"):
        book.learn_vocabularies([("a", "b")], ("de", "en"), **{wish: True})


def test_with_both_directions_each_pair_is_learned_twice(german):
    translator = untrained(GERMAN[:50], both=True, size=120)
    pairs = book.encode_all(translator, GERMAN[:50])
    assert len(pairs) == 100
    assert len(book.encode_all(german, GERMAN[:50])) == 50
    for (src, tgt), (back, forth) in zip(pairs[:50], pairs[50:]):
        assert src[0] != back[0]  # the tags
        assert src[1:] == forth[1:] and back[1:] == tgt[1:]


def test_an_empty_text_stays_empty_though_it_has_a_tag():
    translator = untrained(GERMAN, both=True)
    outputs = translator.translate(["", "der Mann", " "])
    assert (outputs[0], outputs[2]) == ("", "")


@pytest.mark.parametrize("beam", [1, 4])
def test_one_text_is_not_taken_for_its_letters(german, beam):
    [output] = german.translate(["der Mann"], beam)
    assert german.translate("der Mann", beam) == output
    with pytest.raises(InputError, match=r"such as \[text\]"):
        german.hypotheses("der Mann", beam)
    with pytest.raises(InputError, match="lists of words"):
        german.translate_words(["der Mann"], beam)
    for sides in (("der Mann", ["a"]), (["a"], "b"), ("abc", "abc")):
        with pytest.raises(InputError, match=r"such as \[text\]"):
            book.bleu(*sides)


def test_lists_of_words_may_come_one_by_one(german):
    words = [german.split(text) for text in ("der Mann", "ein Hund")]
    whole = german.translate_words(words)
    assert len(whole) == 2
    assert german.translate_words(one for one in words) == whole


@pytest.mark.parametrize("beam", [0, -1])
def test_a_beam_of_none_is_refused(german, beam):
    with pytest.raises(InputError, match="at least 1"):
        german.translate(["der Mann"], beam)
    with pytest.raises(InputError, match="at least 1"):
        german.hypotheses(["der Mann"], beam)


# ------------------------------------------------------------ BPE-dropout


def spellings(translator, epoch, seed=0, dropout=0.2):
    """What a run with this seed reads in this epoch."""
    recipe = book.Recipe(seed=seed, bpe_dropout=dropout)
    run = types.SimpleNamespace(translator=translator)
    train = book.pack(translator, GERMAN)
    return list(book.epochs(run, train, recipe)(epoch))


def test_an_epoch_is_cut_the_same_each_time_and_no_two_alike(german):
    first = spellings(german, 0)
    other = spellings(german, 1)
    assert first != other
    assert spellings(german, 0) == first
    assert spellings(german, 1) == other
    assert spellings(german, 0, seed=1) != first


CUT = """
import hashlib, json, sys, types
sys.path.insert(0, sys.argv[1])
import annotated_transformer as book
pairs = [(pair.de, pair.en) for pair in book.toy_corpus()["train"][:400]]
sizes = dict(N=1, d_model=8, d_ff=8, h=1)
translator = book.untrained_translator(pairs, ("de", "en"), sizes, pieces=200)
run = types.SimpleNamespace(translator=translator)
train = book.pack(translator, pairs)
cut = list(book.epochs(run, train, book.Recipe(bpe_dropout=0.2))(3))
print(hashlib.sha256(json.dumps(cut).encode()).hexdigest())
"""


def test_an_epoch_is_cut_the_same_in_another_process(german):
    """Or a run could not be resumed as what it was."""
    there = subprocess.run(
        [sys.executable, "-c", CUT, str(SCRIPT.parent)],
        env=ONE_THREAD | {"PYTHONHASHSEED": "12345"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    here = json.dumps(spellings(german, 3)).encode()
    assert there.stdout.strip() == hashlib.sha256(here).hexdigest()


@settings(max_examples=100, deadline=None)
@given(
    words=st.lists(st.text(LETTERS + ["ж"], min_size=1, max_size=8)),
    dropout=st.sampled_from([0.1, 0.5, 0.99]),
    draw=st.randoms(use_true_random=False),
)
def test_any_text_comes_back_from_any_spelling(german, words, dropout, draw):
    vocabulary, text = german.src_vocab, " ".join(words)
    cut = book.random_cuts(vocabulary, dropout, draw)(text)
    assert "".join(cut).replace("▁", " ").strip() == text
    known = [piece for piece in cut if "ж" not in piece]
    assert UNK not in vocabulary.encode(known)


def test_no_long_line_is_left_out_of_the_pieces():
    rows = [pair.de for pair in book.toy_corpus()["train"][:300]]
    long = " ".join(["Quitte Qualle Xylophon"] * 300)  # 6,900 bytes
    pieces = book.Pieces.learn([*rows, long], 120)
    assert book.UNK not in pieces.encode(pieces.split("Xylophon"))


def test_without_dropout_words_are_cut_as_in_use(german):
    draw = random.Random(0)
    for pair in GERMAN[:50]:
        for text in pair:
            cut = book.random_cuts(german.src_vocab, 0.0, draw)(text)
            assert cut == german.src_vocab.split(text)
    text = "жжж der Mann, ж øø </s>"  # the unknown are one, side by side
    cut = book.random_cuts(german.src_vocab, 0.0, draw)(text)
    assert "жжж" in cut and cut == german.src_vocab.split(text)


def test_dropout_never_makes_a_special_token():
    html = "<span> </span> <pad <2en <unk >"  # all but the last letter
    translator = untrained(GERMAN[:60] + [(html, html)] * 99, both=True)
    vocabulary = translator.src_vocab
    for seed in range(20):
        cut = book.random_cuts(vocabulary, 0.1, random.Random(seed))
        pieces = cut("<pad> <s> </s> <unk> <2en>")
        ids = vocabulary.encode(pieces)[:-1]
        assert UNK not in ids
        assert not any(map(vocabulary.processor.is_control, ids))


def test_every_spelling_is_of_the_same_text(german):
    vocabulary, pairs = german.src_vocab, spellings(german, 5)
    plain = book.encode_all(german, GERMAN)
    for texts, ids in zip(GERMAN, pairs, strict=True):
        assert ids[0][-1] == ids[1][-1] == EOS and ids[1][0] == book.BOS
        for text, side in zip(texts, (ids[0][:-1], ids[1][1:-1])):
            assert vocabulary.join(vocabulary.decode(side)) == text
    longer = sum(len(a) + len(b) for a, b in pairs)
    shorter = sum(len(a) + len(b) for a, b in plain)
    assert 1.05 * shorter < longer < 3 * shorter


def test_in_use_words_are_cut_as_always(german):
    text = GERMAN[0][0]
    cut = german.split(text)
    spellings(german, 0)
    assert all(german.split(text) == cut for _ in range(20))


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_the_chance_of_the_usual_cut_is_how_often_it_comes(german, dropout):
    rank, draw, times = german.src_vocab.rank, random.Random(0), 2000
    words = {f"▁{word}" for text, _ in GERMAN[:5] for word in text.split()}
    for word in words:
        usual = book.merge_letters(word, rank)
        often = sum(
            book.merge_letters(word, rank, dropout, draw) == usual
            for _ in range(times)
        )
        p = book.chance_of_the_usual_cut(word, rank, dropout)
        allowed = 5 * math.sqrt(p * (1 - p) / times) + 1 / times
        assert abs(often / times - p) <= allowed, word


def test_the_chance_of_the_usual_cut_by_hand():
    rank = {"ab": 0, "bc": 1, "abc": 2}
    chance = book.chance_of_the_usual_cut
    assert chance("xyz", rank, 0.3) == 1  # nothing to merge
    assert math.isclose(chance("ab", rank, 0.3), 0.7)
    # ab first, and then abc; or ab passed over, bc first, and then abc
    by_hand = 0.7 * 0.7 + 0.3 * 0.7 * 0.7
    assert math.isclose(chance("abc", rank, 0.3), by_hand)
    del rank["abc"]  # now only the first way leads to ab, c
    assert math.isclose(chance("abc", rank, 0.3), 0.7)
    assert chance("abc", rank, 0.0) == 1


def test_many_spellings_cost_a_perfect_model_something(german):
    texts = [text for text, _ in GERMAN[:20]]
    prices = [
        book.price_of_other_cuts(german.src_vocab, texts, dropout)
        for dropout in (0.0, 0.1, 0.2)
    ]
    assert prices[0] == 0 < prices[1] < prices[2] < 2


def test_vocabularies_that_could_not_be_loaded_are_not_saved(tmp_path):
    class Letters(book.Vocabulary):
        def split(self, text, language):
            return list(text)

    texts = ["ein Hund rennt .", "a dog runs .", "zwei Hunde rennen ."] * 9
    words = book.Vocabulary(["Hund", "dog"])
    letters, one = Letters(["a", "b"]), book.Pieces.learn(texts, 40)
    other = book.Pieces.learn(texts, 42)
    assert one.model != other.model
    for pair in (letters, letters), (one, other), (one, words), (words, one):
        translator = book.new_translator(pair, ("de", "en"), SIZES)
        with pytest.raises(InputError, match="vocabulary of your own"):
            book.save_translator(translator, tmp_path / "new")
        assert not (tmp_path / "new").exists()


def test_each_side_is_cut_by_its_own_pieces():
    texts = ["ein Hund rennt .", "a dog runs .", "zwei Hunde rennen ."] * 9
    pair = book.Pieces.learn(texts, 40), book.Pieces.learn(texts[:2] * 9, 34)
    translator = book.new_translator(pair, ("de", "en"), SIZES)
    [(src, tgt)] = book.encode_portion(translator, [texts[:2]])
    assert src == pair[0].encode(pair[0].split(texts[0], "de"))
    assert tgt[1:] == pair[1].encode(pair[1].split(texts[1], "en"))


def test_pieces_with_other_ids_for_the_special_tokens_are_refused():
    """sentencepiece's own defaults: <unk> is 0, and there is no padding."""
    import io

    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["ein Hund rennt .", "a dog runs ."] * 9),
        model_writer=written, vocab_size=30, model_type="bpe",
        minloglevel=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="pad_id=-1, bos_id=1"):
        book.Pieces(written.getvalue())


def test_vocabularies_of_another_size_than_the_models_are_refused():
    texts = ["ein Hund rennt .", "a dog runs .", "zwei Hunde rennen ."] * 9
    vocabs = [book.Pieces.learn(texts, 40)] * 2
    for size in (39, 41):
        model = book.Transformer(book.Config(size, size, **SIZES))
        with pytest.raises(InputError, match=f"have 40 .*is for {size} and"):
            book.Translator(model, vocabs, ("de", "en"))


def test_pairs_that_come_once_are_enough_for_both_vocabularies():
    pairs = [("ein Hund", "a dog"), ("zwei Hunde", "two dogs")] * 30
    for pieces in (0, 24):
        listed = book.learn_vocabularies(pairs, ("de", "en"), pieces)
        once = book.learn_vocabularies(iter(pairs), ("de", "en"), pieces)
        assert (
            [v.words for v in once] == [v.words for v in listed]
            if (not pieces)
            else once[0].model == listed[0].model
        )


@pytest.mark.parametrize("code", ["jpn", "zho_Hans", "tha-Thai", "ja", "my"])
def test_a_language_without_spaces_is_known_by_either_code(code):
    score = book.bleu(["ねこがねる"], ["いぬがねる"], language=code)
    assert "tok:13a" not in score.signature
