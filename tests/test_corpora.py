"""Text becomes tokens and comes back; wrong files are named, none is lost."""

import gzip
import hashlib
import http.server
import importlib.util
import re
import threading
import urllib.request
from collections import Counter

import pytest
from helpers import little_room

import annotated_transformer as book

# ---------------------------------------------------------------------- words


@pytest.mark.parametrize(
    "language, text",
    [
        ("de", "Ein Mann, der eine rote Weste trägt, sitzt in einem Boot."),
        ("de", "Wohin geht's? Nach Hause!"),
        ("de", "Ein Junge mit einem Giants-Trikot (Nr. 7) schläft."),
        ("de", "Sie sagt: „Hallo!“ und geht, „nach Hause“, sagt sie."),
        ("en", "A boy wearing headphones sits on a woman's shoulders."),
        ("en", 'A sign that says "Stop" and a man who doesn\'t.'),
        ("en", "They're here; we'll see: a well-known t-shirt (size 10)."),
        ("en", "Dr. Smith paid 5.50, i.e. 50% more."),
    ],
)
def test_a_sentence_survives_tokenizing(language, text):
    words = book.tokenize(text, language)
    assert book.detokenize(words) == text


@pytest.mark.parametrize(
    "language, text, words",
    [
        ("de", "Der Hund schläft.", "Der Hund schläft ."),
        ("de", "Er kommt z.B. um 8 Uhr.", "Er kommt z.B. um 8 Uhr ."),
        ("en", "He doesn't smile.", "He does n't smile ."),
        ("en", "A t-shirt, red!", "A t - shirt , red !"),
    ],
)
def test_punctuation_is_cut_off_and_abbreviations_are_not(
    language, text, words
):
    assert book.tokenize(text, language) == words.split()


@pytest.mark.parametrize("text", ["", "   ", "\t\n", "\u00a0"])
def test_white_space_has_no_words(text):
    assert book.tokenize(text, "de") == []


def test_white_space_never_becomes_a_word():
    words = book.tokenize(" the  man\n\nsleeps \t .", "en")
    assert words == ["the", "man", "sleeps", "."]


def test_a_language_without_rules_gets_general_ones_and_a_note(capsys):
    assert book.tokenize("tlhIngan maH!", "tlh") == ["tlhIngan", "maH", "!"]
    shown = capsys.readouterr()
    assert "'tlh'" in shown.err and "general" in shown.err
    assert shown.out == ""


def read_lines(path):
    """The lines of a file that must not be empty."""
    lines = book.Lines(path)
    lines.check()
    return list(lines)


@pytest.mark.parametrize("language", ["de", "en"])
def test_real_captions_survive_tokenizing(data, language):
    lines = read_lines(data / "multi30k" / f"val.{language}.gz")
    same = sum(
        book.detokenize(book.tokenize(line, language)) == line
        for line in lines
    )
    assert same / len(lines) >= 0.995


# --------------------------------------------------------------- vocabularies

SENTENCES = ["the dog sleeps .".split(), "the dog eats .".split()]


def test_special_tokens_come_first():
    vocabulary = book.Vocabulary.build(SENTENCES)
    assert vocabulary.words[:4] == book.SPECIALS
    places = [book.PAD, book.BOS, book.EOS, book.UNK]
    assert places == [0, 1, 2, 3]


def test_vocabulary_has_the_words_of_its_sentences_and_no_others():
    words = book.Vocabulary.build(SENTENCES).words
    assert Counter(words[4:]) == Counter("the dog sleeps eats .".split())
    assert len(book.Vocabulary.build(SENTENCES)) == 4 + 5


def test_rare_words_are_left_out():
    words = book.Vocabulary.build(SENTENCES, min_count=2).words
    assert set(words[4:]) == {"the", "dog", "."}


def test_order_of_the_sentences_does_not_matter():
    there = book.Vocabulary.build(SENTENCES)
    back = book.Vocabulary.build(SENTENCES[::-1])
    assert there.words == back.words


def test_unknown_words_become_unk_and_the_end_is_marked():
    vocabulary = book.Vocabulary.build(SENTENCES)
    known = vocabulary.encode(["dog"])[0]
    assert known > book.UNK
    expected = [known, book.UNK, book.EOS]
    assert vocabulary.encode(["dog", "cat"]) == expected
    assert vocabulary.encode([]) == [book.EOS]


def test_decode_undoes_encode():
    vocabulary = book.Vocabulary.build(SENTENCES)
    for sentence in SENTENCES:
        *tokens, end = vocabulary.encode(sentence)
        assert vocabulary.decode(tokens) == sentence
        assert end == book.EOS


@pytest.mark.parametrize("min_count", [1, 2])
def test_text_that_looks_like_a_special_token_is_none(min_count):
    text = [*book.SPECIALS, "dog"]
    vocabulary = book.Vocabulary.build([text] * 3, min_count)
    *tokens, end = vocabulary.encode(text)
    assert not set(tokens) & {book.PAD, book.BOS, book.EOS}
    assert Counter(vocabulary.words)["<pad>"] == 1
    again = book.Vocabulary(vocabulary.words)  # as if saved and loaded
    assert again.encode(text) == [*tokens, end]


def test_the_test_set_adds_no_word_to_the_vocabulary(folder):
    write(folder, test_de=["Zebra"], test_en=["zebra"])
    train, _ = book.training_pairs(folder, "de", "en")
    translator = untrained(train)
    assert translator.src_vocab.encode(["Zebra"])[0] == book.UNK
    assert translator.tgt_vocab.encode(["zebra"])[0] == book.UNK


# -------------------------------------------------------------- a single file


def write(folder, **files):
    """Write the lists of lines: train_de=[...] is the file train.de."""
    for name, lines in files.items():
        path = folder / name.replace("_", ".")
        path.write_bytes("".join(f"{line}\n" for line in lines).encode())


@pytest.fixture
def folder(tmp_path):
    """A corpus of 120 pairs, no two alike, and 3 for validation."""
    numbers = range(120)
    write(
        tmp_path,
        train_de=[f"Satz {n} ." for n in numbers],
        train_en=[f"sentence {n} ." for n in numbers],
        val_de=["eins", "zwei", "drei"],
        val_en=["one", "two", "three"],
    )
    return tmp_path


def refused(function, *arguments):
    """The message of the InputError that the call must raise."""
    with pytest.raises(book.InputError) as caught:
        function(*arguments)
    return str(caught.value)


def test_plain_and_compressed_files_read_alike(tmp_path):
    content = "Ärger über Öl\n\nletzte Zeile ohne Ende".encode()
    (tmp_path / "plain.de").write_bytes(content)
    (tmp_path / "packed.de.gz").write_bytes(gzip.compress(content))
    plain = read_lines(tmp_path / "plain.de")
    assert plain == ["Ärger über Öl", "", "letzte Zeile ohne Ende"]
    assert read_lines(tmp_path / "packed.de.gz") == plain


def test_files_from_windows_are_read_alike(tmp_path):
    path = tmp_path / "windows.de"
    path.write_bytes(b"\xef\xbb\xbf" + "Tür\r\nTor\r\n".encode())
    assert read_lines(path) == ["Tür", "Tor"]


@pytest.mark.parametrize("odd", ["\u2028", "\x0b", "\x0c", "\x85", "\x1c"])
def test_only_line_ends_end_a_line(tmp_path, odd):
    path = tmp_path / "odd.de"
    path.write_bytes(f"eins{odd}zwei\ndrei\n".encode())
    assert len(read_lines(path)) == 2


@pytest.mark.parametrize("sign", ["\u200b", "\u200e", "\ufeff", "\u3000"])
def test_a_line_of_signs_that_nobody_sees_is_empty(folder, sign):
    """Texts from the web have such; they would teach to write nothing."""
    write(folder, train_de=["kurz", f" {sign}{sign} ", f"{sign}lang"])
    write(folder, train_en=["short", "one", f"long {sign}"])
    train, _ = book.training_pairs(folder, "de", "en")
    assert list(train) == [("kurz", "short"), ("lang", "long")]
    assert train.facts["empty"] == 1
    inside = folder / "inside"  # where it may mean something, it stays
    inside.write_text("\u0645\u06cc\u200c\u062e\u0648\n", encoding="utf-8")
    assert "\u200c" in read_lines(inside)[0]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"  \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_named(tmp_path, content):
    path = tmp_path / "train.de"
    path.write_bytes(content)
    message = refused(read_lines, path)
    assert str(path) in message and "empty" in message


def test_other_encodings_are_named_with_their_line(tmp_path):
    path = tmp_path / "train.de"
    path.write_bytes(b"eins\nzwei\n" + "Tür\n".encode("latin-1"))
    message = refused(read_lines, path)
    assert f"{path}, line 3" in message
    assert "UTF-8" in message and "iconv -f" in message
    assert "latin1" not in message  # which fits any file, and tells nothing


@pytest.mark.parametrize("text", ["eins\nzwei\n", "그 사람은 책을\n읽고\n"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_is_not_taken_for_text_with_zeros(
    tmp_path, encoding, text
):
    """Of its bytes half are zero, or few; zero is a letter of UTF-8 too."""
    path = tmp_path / "train.de"
    path.write_bytes(text.encode(encoding))
    message = refused(read_lines, path)
    assert f"{path}, line 1" in message and "iconv -f utf-16" in message


@pytest.mark.parametrize("mark", [b"\xff\xfe", b"\xfe\xff"])
def test_utf_16_is_known_by_its_mark_where_no_byte_is_zero(tmp_path, mark):
    path = tmp_path / "train.ko"
    path.write_bytes(mark + "안녕하세요".encode("utf-16-le"))
    message = refused(read_lines, path)
    assert f"{path}, line 1" in message and "iconv -f utf-16" in message


def test_a_stray_zero_byte_is_not_taken_for_another_encoding(tmp_path):
    path = tmp_path / "train.de"
    path.write_bytes(b"eins\nzw\0ei\n")
    message = refused(read_lines, path)
    assert f"{path}, line 2" in message
    assert "iconv" not in message and "tr -d" in message
    path.write_bytes(b"ein\0 gutes Wort\nzwei\n")  # told apart by no mark
    message = refused(read_lines, path)
    assert f"{path}, line 1: a zero byte" in message
    assert "tr -d" in message and "iconv -f utf-16" in message
    path.write_bytes(b"ein Wort\n\0zwei\n")  # or the half of a line's end
    message = refused(read_lines, path)
    assert f"{path}, line 2: a zero byte" in message
    assert "tr -d" in message and "iconv -f utf-16" in message


def test_other_encodings_are_found_in_compressed_files_too(tmp_path):
    path = tmp_path / "train.de.gz"
    path.write_bytes(gzip.compress("eins\nTür\n".encode("latin-1")))
    assert f"{path}, line 2" in refused(read_lines, path)


@pytest.mark.parametrize("kept", [0.5, 0.99])
def test_a_truncated_compressed_file_is_named(tmp_path, kept):
    path = tmp_path / "train.de.gz"
    whole = gzip.compress("\n".join(map(str, range(5000))).encode())
    path.write_bytes(whole[: int(kept * len(whole))])
    assert str(path) in refused(read_lines, path)


@pytest.mark.parametrize("content", [b"plain text\n", b"\x1f\x8b\x08junkjunk"])
def test_a_file_that_is_only_called_gz_is_named(tmp_path, content):
    path = tmp_path / "train.de.gz"
    path.write_bytes(content)
    assert str(path) in refused(read_lines, path)


def test_damage_inside_a_compressed_file_is_named(tmp_path):
    path = tmp_path / "train.de.gz"
    content = bytearray(gzip.compress(bytes(range(97, 123)) * 50))
    for i in range(12, 30):
        content[i] ^= 0x5A
    path.write_bytes(content)
    assert str(path) in refused(read_lines, path)


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    tmp_path, monkeypatch
):
    path = tmp_path / "train.de"
    path.write_text("eins\n", encoding="utf-8")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(book, "open", refuse, raising=False)
    message = refused(read_lines, path)
    assert str(path) in message and "may not read" in message


# --------------------------------------------------------------------- a part


def test_a_plain_file_beside_a_compressed_one_is_refused(folder):
    (folder / "val.de.gz").write_bytes(gzip.compress(b"eins\n"))
    message = refused(book.read_pairs, folder, "val", "de", "en")
    assert "val.de and val.de.gz" in message and str(folder) in message


def test_what_is_no_file_is_not_listed_as_one(folder):
    (folder / "val.de").unlink()
    (folder / "val.de").symlink_to("nowhere")
    message = refused(book.read_pairs, folder, "val", "de", "en")
    listed = message.split("there is: ")[1].split("; ")[0].split(", ")
    assert "val.en" in listed and "val.de" not in listed
    assert "take the other val file away" in message


def test_the_cause_is_named_where_no_pair_is_left(folder):
    """All pairs lack a side; and there are val files."""
    for language, lines in (("de", "\neins\n"), ("en", "one\n\n")):
        (folder / f"train.{language}").write_text(lines, encoding="utf-8")
    texts, _ = book.training_pairs(folder, "de", "en")
    message = refused(lambda: texts.facts)
    assert "of 2 pairs 2 have an empty side" in message
    assert "val." not in message
    for path in folder.glob("val.*"):
        path.unlink()
    for language, lines in (("de", "eins\n\n"), ("en", "one\ntwo\n")):
        (folder / f"train.{language}").write_text(lines, encoding="utf-8")
    texts, _ = book.training_pairs(folder, "de", "en")
    assert "val." in refused(lambda: texts.facts)


def test_pairs_are_lines_of_equal_number(folder):
    pairs = book.read_pairs(folder, "val", "de", "en")
    assert pairs == [("eins", "one"), ("zwei", "two"), ("drei", "three")]
    assert book.read_pairs(str(folder), "val", "de", "en") == pairs
    back = book.read_pairs(folder, "val", "en", "de")
    assert back == [(en, de) for de, en in pairs]


def test_a_missing_file_is_named_beside_what_is_there(folder):
    (folder / "train.en").unlink()
    message = refused(book.read_pairs, folder, "train", "de", "en")
    assert "train.en" in message and str(folder) in message
    assert "train.de" in message.partition("there is")[2]


def test_unequal_numbers_of_lines_are_both_named(folder):
    write(folder, train_en=map(str, range(1234)))
    message = refused(book.read_pairs, folder, "train", "de", "en")
    assert "120 and 1,234" in message
    assert "train.de" in message and "train.en" in message


def test_an_empty_line_keeps_the_others_in_step(folder):
    write(folder, val_en=["one", "", "three"])
    pairs = book.read_pairs(folder, "val", "de", "en")
    assert pairs == [("eins", "one"), ("zwei", ""), ("drei", "three")]


def test_one_file_may_be_plain_and_the_other_compressed(folder):
    expected = book.read_pairs(folder, "val", "de", "en")
    plain = folder / "val.de"
    packed = gzip.compress(plain.read_bytes())
    (folder / "val.de.gz").write_bytes(packed)
    plain.unlink()
    assert book.read_pairs(folder, "val", "de", "en") == expected


@pytest.mark.parametrize("name", ["nowhere", "a file"])
def test_what_is_no_folder_is_named_with_what_would_do(tmp_path, name):
    (tmp_path / "a file").write_text("x", encoding="utf-8")
    corpus = str(tmp_path / name)
    message = refused(book.corpus_part, corpus, "train", "de", "en")
    assert corpus in message
    for remedy in ("toy", "multi30k", "train.de", "train.en"):
        assert remedy in message


def test_toy_corpus_goes_both_ways():
    there = book.corpus_part("toy", "test", "de", "en")
    back = book.corpus_part("toy", "test", "en", "de")
    first = book.toy_corpus()["test"][0]
    assert there[0] == (first.de, first.en)
    assert back == [(en, de) for de, en in there]
    assert len(there) == 1000


@pytest.mark.parametrize(
    "part, src, tgt",
    [
        ("dev", "de", "en"),
        ("test", "de", "fr"),
        ("test", "fr", "en"),
        ("test", "de", "de"),
    ],
)
def test_what_the_toy_corpus_lacks_is_named(part, src, tgt):
    message = refused(book.corpus_part, "toy", part, src, tgt)
    assert f"{part} of {src}-{tgt}" in message
    for remedy in ("de", "en", "train", "val", "test"):
        assert remedy in message


# --------------------------------------------------------- what training gets


def test_training_and_validation_pairs_are_texts(folder):
    train, val = book.training_pairs(folder, "de", "en")
    report = train.report(val)
    assert list(train)[7] == ("Satz 7 .", "sentence 7 .")
    assert len(train) == 120
    assert val[0] == ("eins", "one")
    assert "120 training pairs" in report and "3 for validation" in report
    assert "left out" not in report


def test_of_many_validation_pairs_it_is_said_which_are_used(folder):
    write(folder, val_de=["eins"] * 1001, val_en=["one"] * 1001)
    train, val = book.training_pairs(folder, "de", "en")
    assert "1,001 for validation (the first 1,000" in train.report(val)
    write(folder, val_de=["eins"] * 1000, val_en=["one"] * 1000)
    train, val = book.training_pairs(folder, "de", "en")
    assert "(" not in train.report(val)


def test_what_is_left_out_is_counted(folder):
    german = ["kurz", "", "lang", " \t"]
    english = ["short", "one", "  ", ""]
    write(folder, train_de=german, train_en=english)
    train, val = book.training_pairs(folder, "de", "en")
    report = train.report(val)
    assert list(train) == [("kurz", "short")]
    assert "1 training pairs" in report
    assert "3 with an empty side" in report


def untrained(pairs, **how):
    """A very small model of German and English for these pairs."""
    sizes = dict(N=1, d_model=8, d_ff=8, h=1)
    return book.untrained_translator(pairs, ("de", "en"), sizes, **how)


def test_pairs_with_a_long_side_are_left_out_and_counted():
    pairs = [("wort " * n, "word") for n in (1, 100, 101, 500)]
    pairs += [("wort", "word " * n) for n in (100, 101)]
    translator = untrained(pairs)
    packed = book.pack(translator, pairs)
    kept = [pairs[i] for i in (0, 1, 4)]
    assert list(packed) == book.encode_all(translator, kept)
    assert packed.long == [2, 3, 5]


def test_the_longer_side_decides_what_is_too_long():
    pairs = [("a", "a"), ("b", "b c d e")]
    packed = book.pack(untrained(pairs), pairs, longest=3)
    assert (len(packed), packed.long) == (1, [1])


def test_a_tag_does_not_count_as_length():
    pairs = [("a b c", "a")] * 40
    translator = untrained(pairs, pieces=13, both=True)
    assert len(translator.split("a b c")) == 4  # the tag as well
    assert len(book.pack(translator, pairs, longest=3)) == 80
    assert "at most 2" in refused(book.pack, translator, pairs, None, 2)


@pytest.mark.parametrize("number", [20, 3000])
def test_a_full_disk_is_named_where_pairs_are_packed(tmp_path, number):
    """Few stay in Python's memory till the file is closed, which fails too."""
    pairs = [("wort " * 9, "word " * 9)] * number
    translator = untrained(pairs)
    with pytest.raises(book.NotWritten) as found, little_room(100):
        book.pack(translator, pairs, folder=tmp_path)
    assert f"a temporary file in {tmp_path}" in str(found.value)


def test_if_all_pairs_are_too_long_that_is_an_error():
    pairs = [("a b c", "a")]
    message = refused(book.pack, untrained(pairs), pairs, None, 2)
    assert "at most 2 tokens" in message


def texts(train):
    return {src for src, _ in train}


def test_without_validation_files_some_training_pairs_are_held_out(folder):
    for path in folder.glob("val.*"):
        path.unlink()
    train, val = book.training_pairs(folder, "de", "en")
    report = train.report(val)
    held = {src for src, _ in val}
    assert not texts(train) & held
    assert texts(train) | held == {f"Satz {n} ." for n in range(120)}
    assert len(val) == 3
    assert "taken from the training set" in report


def test_what_is_held_out_has_two_sides_of_sane_length(tmp_path):
    """Blank and endless lines are used for nothing, and all such refused."""
    lines = [f"w{n}" for n in range(300)]
    lines[50], lines[100], lines[150] = "", "w" * 1001, "w" * 1000
    write(tmp_path, train_de=lines, train_en=lines)
    train, val = book.training_pairs(tmp_path, "de", "en")
    assert [src for src, _ in val] == ["w0", "w" * 1000, "w200", "w250"]
    assert not texts(train) & {"w0", lines[100], *(src for src, _ in val)}
    counts = [int(n) for n in re.findall(r"\d+", train.report(val))]
    assert counts == [294, 4, 2] and sum(counts) == len(lines)
    lines[0] = lines[150] = lines[200] = lines[250] = ""
    write(tmp_path, train_de=lines, train_en=lines)
    with pytest.raises(book.InputError, match="val.de and val.en"):
        book.training_pairs(tmp_path, "de", "en")


@pytest.mark.parametrize("content", ["", "\n" * 60])
def test_training_text_of_nothing_is_named(tmp_path, content):
    """It is not the fault of what was held out."""
    for language in ("de", "en"):
        (tmp_path / f"train.{language}").write_text(content, encoding="utf-8")
    message = refused(book.training_pairs, tmp_path, "de", "en")
    assert str(tmp_path / "train.de") in message and "empty" in message


@pytest.mark.parametrize(
    "number, step", [(50_000, 50), (50_001, 100), (100_001, 200)]
)
def test_at_most_a_thousand_pairs_of_all_parts_are_held_out(
    tmp_path, number, step
):
    lines = [f"w{n}" for n in range(number)]
    write(tmp_path, train_de=lines, train_en=lines)
    train, val = book.training_pairs(tmp_path, "de", "en")
    held = [f"w{n}" for n in range(0, number, step)]
    assert [src for src, _ in val] == held and 500 <= len(held) <= 1000
    assert len(train) == number - len(held)
    assert not texts(train) & {*held}


def test_what_is_held_out_is_not_in_the_training_text_a_second_time(tmp_path):
    """Not even where its pair stands again, far away."""
    lines = [f"w{n} " + 30 * "w" for n in range(200)]
    lines[70] = lines[199] = lines[50]
    lines[71] = "other"  # the source of a held pair, with another target
    lines[150] = lines[151] = "yes"  # too short for a copy to mean much
    sources = [*lines[:71], lines[100], *lines[72:]]
    write(tmp_path, train_de=sources, train_en=lines)
    train, val = book.training_pairs(tmp_path, "de", "en")
    assert [tgt for _, tgt in val] == [lines[n] for n in (0, 50, 100, 150)]
    assert (lines[100], "other") in list(train)
    assert lines[50] not in texts(train) and ("yes", "yes") in list(train)
    assert len(train) == len(list(train)) == 194
    assert "left out: 2 that are held out as well" in train.report(val)


def test_copies_of_validation_files_are_counted_and_stay(tmp_path):
    """What is in the files is the reader's choice; what it does is said."""
    lines = [f"w{n} " + 30 * "w" for n in range(9)]
    lines[5] = lines[7] = lines[3]
    targets = [*lines[:7], "other", lines[8]]
    write(tmp_path, train_de=lines, train_en=targets)
    write(tmp_path, val_de=lines[2:4], val_en=lines[2:4])
    train, val = book.training_pairs(tmp_path, "de", "en")
    assert len(train) == len(list(train)) == 9 and len(val) == 2
    said = train.report(val)
    assert "3 of the training pairs are in the validation set, too" in said
    assert "left out" not in said
    write(tmp_path, val_de=["other"], val_en=["other"])
    train, val = book.training_pairs(tmp_path, "de", "en")
    assert "too" not in train.report(val)


def test_nothing_but_copies_is_named(tmp_path):
    lines = ["the same long sentence once more and again"] * 60
    write(tmp_path, train_de=lines, train_en=lines)
    train, _ = book.training_pairs(tmp_path, "de", "en")
    assert "its copies" in refused(len, train)


def test_what_was_held_out_can_be_measured(tmp_path):
    lines = [f"w{n}" for n in range(120)]
    write(tmp_path, train_de=lines, train_en=lines)
    _, val = book.training_pairs(tmp_path, "de", "en")
    assert book.pairs_to_measure(tmp_path, "val", "de", "en") == val
    turned = book.pairs_to_measure(tmp_path, "val", "en", "de")
    assert turned == [(tgt, src) for src, tgt in val]
    write(tmp_path, train_en=lines[:-1])  # in training it is an error, too
    message = refused(book.pairs_to_measure, tmp_path, "val", "de", "en")
    assert "120 and 119 lines" in message
    for path in tmp_path.iterdir():
        path.unlink()
    write(tmp_path, test_de=["a"], test_en=["b"])
    message = refused(book.pairs_to_measure, tmp_path, "val", "de", "en")
    assert "no val.de" in message and "--split names the part" in message
    assert "take the other" not in message
    (tmp_path / "test.de").unlink()
    write(tmp_path, val_de=["a"], val_en=["b"])
    found = book.pairs_to_measure(tmp_path, "val", "de", "en")
    assert found == [("a", "b")]
    message = refused(book.pairs_to_measure, tmp_path, "test", "de", "en")
    assert "test.de" in message and "--split val" in message


@pytest.mark.parametrize("step", [1, 2, 3, 50])
def test_each_nth_line_is_that_of_all(tmp_path, step):
    path = tmp_path / "lines"
    path.write_bytes(b"\xef\xbb\xbfeins\n zwei\n\ndrei\nvier")
    lines = book.Lines(path)
    assert list(lines.every(step)) == list(lines)[::step]


def test_the_line_of_an_error_is_counted_with_those_passed_over(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"a\n" * 100 + b"\xff\n")
    with pytest.raises(book.InputError, match="line 101"):
        list(book.Lines(path).every(50))


@pytest.mark.parametrize("missing", ["val.de", "val.en"])
def test_half_a_validation_set_is_an_error(folder, missing):
    (folder / missing).unlink()
    message = refused(book.training_pairs, folder, "de", "en")
    assert missing in message


def test_nothing_to_train_on_is_an_error(folder):
    write(folder, train_de=["", "a"], train_en=["a", ""])
    train, _ = book.training_pairs(folder, "de", "en")
    assert str(folder) in refused(len, train)


def test_a_folder_may_be_named_by_text(folder):
    (one, val), (two, also) = (
        book.training_pairs(name, "de", "en") for name in (folder, str(folder))
    )
    assert (list(one), val) == (list(two), also)


def test_another_script_goes_through(data, capsys):
    book.tokenizer.cache_clear()
    folder = str(data / "ko-en")
    train, val = book.training_pairs(folder, "ko", "en")
    report = train.report(val)
    assert len(train) > 3000 and len(val) == 75
    assert all(src and tgt for src, tgt in train)
    assert "training pairs" in report
    words = [word for src, _ in train for word in book.tokenize(src, "ko")]
    if importlib.util.find_spec("natto") is None:
        note = capsys.readouterr().err
        assert "'ko'" in note and "general" in note
    hangul = [word for word in words if "가" <= word[0] <= "힣"]
    assert len(hangul) > 20_000


# ------------------------------------------------------------------ downloads

CONTENT = gzip.compress(b"eins\nzwei\n", mtime=0)
NAME = "train.de.gz"


class Host(http.server.BaseHTTPRequestHandler):
    """Serves CONTENT under good/, and something else elsewhere."""

    def do_GET(self):
        kind = self.path.split("/")[1]
        self.server.requests.append(self.path)
        if kind == "missing":
            return self.send_error(404)
        body = b"other bytes" if kind == "wrong" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:9] if kind == "broken" else body)

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture(scope="module")
def server():
    """A host on this machine; `requests` lists what it was asked for."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Host) as server:
        server.requests = []
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def host(server, monkeypatch):
    """Addresses of the host by kind, where NAME's digest is CONTENT's."""
    digest = hashlib.sha256(CONTENT).hexdigest()
    monkeypatch.setitem(book.MULTI30K_DIGESTS, NAME, digest)
    monkeypatch.setenv("no_proxy", "*")
    server.requests.clear()
    port = server.server_address[1]
    return lambda kind: f"http://127.0.0.1:{port}/{kind}/"


def test_a_file_is_downloaded_whole_and_alone(host, tmp_path):
    folder = tmp_path / "new" / "folder"
    path = book.fetch(NAME, folder, [host("good")])
    assert path == folder / NAME
    assert path.read_bytes() == CONTENT
    assert list(folder.iterdir()) == [path]
    assert read_lines(path) == ["eins", "zwei"]


BAD = ["missing", "wrong", "broken"]


@pytest.mark.parametrize("bad", BAD)
def test_after_a_bad_host_the_next_is_asked(host, server, tmp_path, bad):
    path = book.fetch(NAME, tmp_path, [host(bad), host("good")])
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [path]
    assert server.requests == [f"/{bad}/{NAME}", f"/good/{NAME}"]


def test_after_a_good_host_no_other_is_asked(host, server, tmp_path):
    book.fetch(NAME, tmp_path, [host("good"), host("wrong")])
    assert server.requests == [f"/good/{NAME}"]


def test_two_processes_may_download_one_file(host, tmp_path, monkeypatch):
    """The second does all of it while the first writes."""
    real, written = book.write_whole, []

    def write_whole(path, write):
        def write_slowly(unfinished):
            write(unfinished)
            written.append(unfinished)
            if len(written) == 1:
                with monkeypatch.context() as patch:
                    patch.setattr(book.os, "getpid", lambda: 2)
                    book.fetch(NAME, tmp_path, [host("good")])

        real(path, write_slowly)

    monkeypatch.setattr(book, "write_whole", write_whole)
    path = book.fetch(NAME, tmp_path, [host("good")])
    assert path.read_bytes() == CONTENT and len({*written}) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_download_that_finds_no_room_is_named(host, tmp_path):
    with little_room(3), pytest.raises(book.NotWritten) as caught:
        book.fetch(NAME, tmp_path, [host("good")])
    assert f"{tmp_path / NAME}: not written" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_host_that_does_not_answer_is_passed_over(host, tmp_path):
    nobody = "http://127.0.0.1:9/"  # the port of the discard protocol
    path = book.fetch(NAME, tmp_path, [nobody, host("good")])
    assert path.read_bytes() == CONTENT


def test_if_all_hosts_fail_each_is_named_and_the_remedy(host, tmp_path):
    hosts = [host(bad) for bad in BAD]
    message = refused(book.fetch, NAME, tmp_path, hosts)
    for address in hosts:
        assert address + NAME in message
    assert "404" in message and "SHA-256" in message
    assert "--corpus FOLDER" in message
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_asked_for(host, server, tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT)
    path = book.fetch(NAME, tmp_path, [host("good")])
    assert path.read_bytes() == CONTENT
    assert server.requests == []


def test_a_wrong_file_that_is_there_is_named_and_kept(host, server, tmp_path):
    path = tmp_path / NAME
    path.write_bytes(b"mine")
    message = refused(book.fetch, NAME, tmp_path, [host("good")])
    assert str(path) in message and "delete" in message
    assert path.read_bytes() == b"mine"
    assert server.requests == []


@pytest.fixture
def no_network(monkeypatch):
    def urlopen(*arguments, **options):
        raise AssertionError(f"asked the network: {arguments}")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)


@pytest.mark.parametrize(
    "part, src, tgt, missing",
    [
        ("test_1999", "de", "en", "test_1999.de.gz"),
        ("train", "xx", "en", "train.xx.gz"),
        ("train", "de", "xx", "train.xx.gz"),
    ],
)
def test_what_multi30k_lacks_is_named_before_any_download(
    no_network, tmp_path, monkeypatch, part, src, tgt, missing
):
    monkeypatch.chdir(tmp_path)
    message = refused(book.corpus_part, "multi30k", part, src, tgt)
    assert missing in message
    assert "test_2016_flickr" in message  # what it has
    assert list(tmp_path.iterdir()) == []


def test_multi30k_put_in_place_needs_no_network(
    no_network, data, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "data" / "multi30k"
    place.mkdir(parents=True)
    for name in ("val.de.gz", "val.en.gz"):
        content = (data / "multi30k" / name).read_bytes()
        (place / name).write_bytes(content)
    pairs = book.corpus_part("multi30k", "val", "de", "en")
    assert len(pairs) == 1014
    assert pairs[1] == (
        "Ein Mann schläft in einem grünen Raum auf einem Sofa.",
        "A man sleeping in a green room on a couch.",
    )


def test_a_file_beside_the_one_that_was_checked_is_refused(
    host, tmp_path, monkeypatch
):
    """It would be read instead, whatever it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(
        book.MULTI30K_DIGESTS, "train.en.gz", book.MULTI30K_DIGESTS[NAME]
    )
    place = tmp_path / "data" / "multi30k"
    place.mkdir(parents=True)
    for name in (NAME, "train.en.gz"):
        (place / name).write_bytes(CONTENT)
    pairs = book.corpus_part("multi30k", "train", "de", "en")
    assert pairs == [("eins", "eins"), ("zwei", "zwei")]
    plain = place / "train.en"
    plain.write_text("one\ntwo\n", encoding="utf-8")
    message = refused(book.corpus_part, "multi30k", "train", "de", "en")
    assert str(plain.relative_to(tmp_path)) in message
    assert "train.en.gz" in message


def test_digests_are_those_that_were_published(data):
    listing = (data / "multi30k" / "PUBLIC_SHA256SUMS").read_text("utf-8")
    public = {
        name: digest for digest, name in map(str.split, listing.splitlines())
    }
    assert len(book.MULTI30K_DIGESTS) == 15
    assert book.MULTI30K_DIGESTS.items() <= public.items()


def test_hosts_are_several_and_asked_over_https():
    assert len(book.MULTI30K_HOSTS) >= 2
    for address in book.MULTI30K_HOSTS:
        assert address.startswith("https://") and address.endswith("/")


def test_sentences_are_shorter_than_the_model_is_wide(monkeypatch):
    examine = book.CLAIMS["sentences_are_shorter_than_d"].examine
    holds, found = examine(folder="no such folder")
    assert holds and "(toy)" in found
    long = [("das " * 130, "the cat sleeps .")] * 8
    monkeypatch.setattr(book, "corpus_part", lambda *_: long)
    holds, found = examine()
    assert not holds and "50.0% and 100.0%" in found


def test_captions_are_shorter_than_the_model_is_wide(data):
    examine = book.CLAIMS["sentences_are_shorter_than_d"].examine
    folder = str(data / "multi30k")
    holds, found = examine(folder=folder)
    assert holds and folder in found and "58,000" in found
