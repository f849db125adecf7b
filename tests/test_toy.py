"""The generated corpus is right German, right English, and fair."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import annotated_transformer as book

FOLDER = Path(book.__file__).parent


@pytest.fixture(scope="module")
def corpus():
    return book.toy_corpus()


@pytest.fixture(scope="module")
def everything(corpus):
    return [pair for part in corpus.values() for pair in part]


# ---------------------------------------------------------------- noun phrases

PHRASES = [
    # What it is, the three cases, and the English.
    ("Mann der alt s", "der alte Mann", "den alten Mann", "dem alten Mann",
     "the old man"),
    ("Mann ein alt s", "ein alter Mann", "einen alten Mann",
     "einem alten Mann", "an old man"),
    ("Mann ein alt p", "alte Männer", "alte Männer", "alten Männern",
     "old men"),
    ("Mann dieser alt p", "diese alten Männer", "diese alten Männer",
     "diesen alten Männern", "these old men"),
    ("Frau der jung s", "die junge Frau", "die junge Frau",
     "der jungen Frau", "the young woman"),
    ("Frau ein jung s", "eine junge Frau", "eine junge Frau",
     "einer jungen Frau", "a young woman"),
    ("Frau der - p", "die Frauen", "die Frauen", "den Frauen", "the women"),
    ("Kind der klein s", "das kleine Kind", "das kleine Kind",
     "dem kleinen Kind", "the little child"),
    ("Kind ein klein s", "ein kleines Kind", "ein kleines Kind",
     "einem kleinen Kind", "a little child"),
    ("Kind mein klein p", "meine kleinen Kinder", "meine kleinen Kinder",
     "meinen kleinen Kindern", "my little children"),
    ("Kind dieser müd s", "dieses müde Kind", "dieses müde Kind",
     "diesem müden Kind", "this tired child"),
    ("Junge der - s", "der Junge", "den Jungen", "dem Jungen", "the boy"),
    ("Junge der - p", "die Jungen", "die Jungen", "den Jungen", "the boys"),
    ("Student ein müd s", "ein müder Student", "einen müden Studenten",
     "einem müden Studenten", "a tired student"),
    ("Bauer dieser - s", "dieser Bauer", "diesen Bauern", "diesem Bauern",
     "this farmer"),
    ("Lehrer der - s", "der Lehrer", "den Lehrer", "dem Lehrer",
     "the teacher"),
    ("Lehrer der - p", "die Lehrer", "die Lehrer", "den Lehrern",
     "the teachers"),
    ("Mädchen mein - s", "mein Mädchen", "mein Mädchen", "meinem Mädchen",
     "my girl"),
    ("Mädchen mein - p", "meine Mädchen", "meine Mädchen", "meinen Mädchen",
     "my girls"),
    ("Auto der rot p", "die roten Autos", "die roten Autos",
     "den roten Autos", "the red cars"),
    ("Milch ein kalt s", "kalte Milch", "kalte Milch", "kalter Milch",
     "cold milk"),
    ("Tee ein kalt s", "kalter Tee", "kalten Tee", "kaltem Tee", "cold tea"),
    ("Brot ein frisch s", "frisches Brot", "frisches Brot", "frischem Brot",
     "fresh bread"),
    ("Apfelbaum ein - s", "ein Apfelbaum", "einen Apfelbaum",
     "einem Apfelbaum", "an apple+tree"),
    ("Haustür mein grün s", "meine grüne Haustür", "meine grüne Haustür",
     "meiner grünen Haustür", "my green front+door"),
]  # fmt: skip


@pytest.mark.parametrize("what, nom, acc, dat, english", PHRASES)
def test_noun_phrases_are_declined(what, nom, acc, dat, english):
    lemma, article, adjective, number = what.replace("-", "").split(" ")
    for case, german in zip(book.CASES, (nom, acc, dat), strict=True):
        details = number == "p", article, adjective
        assert book.noun_phrase(lemma, case, *details) == (german, english)


# A second list, by hand, so that a slip in the book's table shows.
GENDERS = {
    "m": "Mann Bauer Lehrer Arzt Onkel Student Bäcker Gärtner Junge Bruder "
    "Hund Vogel Esel Apfel Kuchen Apfelkuchen Käse Tee Kaffee Apfelsaft "
    "Roman Brief Mantel Keller Korb Koffer Ball Schlüssel Apfelbaum",
    "f": "Frau Königin Tante Tochter Schwester Katze Birne Butter Milch "
    "Geschichte Jacke Tür Haustür Küche Kiste Blume Kaffeetasse Brücke",
    "n": "Kind Mädchen Pferd Ei Brot Wasser Buch Bilderbuch Gedicht Märchen "
    "Hemd Sommerkleid Auto Fahrrad Gartentor Fenster Zimmer Wohnzimmer Bild "
    "Haus",
}


def test_genders_agree_with_an_independent_list():
    listed = {noun: g for g in GENDERS for noun in GENDERS[g].split()}
    table = {n: book.NOUNS[n].gender.replace("w", "m") for n in book.NOUNS}
    assert table == listed
    weak = {n for n in book.NOUNS if book.NOUNS[n].gender == "w"}
    assert weak == {"Bauer", "Student", "Junge"}


def test_compounds_take_the_gender_and_plural_of_their_last_part():
    for compound, last in [
        ("Apfelkuchen", "Kuchen"), ("Bilderbuch", "Buch"),
        ("Haustür", "Tür"), ("Wohnzimmer", "Zimmer"),
    ]:  # fmt: skip
        whole, part = book.NOUNS[compound], book.NOUNS[last]
        assert whole.gender == part.gender
        assert whole.plural.lower().endswith(part.plural.lower())


def test_particles_come_first():
    for verb in book.VERBS.values():
        assert verb.infinitive == verb.particle + verb.plural
        assert verb.participle.startswith(verb.particle)
        if verb.particle:
            assert verb.participle.startswith(verb.particle + "ge")


# ------------------------------------------------------------- whole sentences


def build(subject, verb, thing, tense="present", front="subject", **more):
    """A sentence from (lemma, plural, article, adjective) and so on."""
    parts = {}
    for role, phrase in [
        ("subject", subject),
        ("object", thing),
        ("recipient", more.get("recipient")),
    ]:
        if phrase:
            lemma, *rest = phrase
            strings = book.noun_phrase(lemma, book.CASE_OF[role], *rest)
            parts[role] = book.linked(role, *strings)
    parts |= book.verb_pieces(book.VERBS[verb], tense, subject[1])
    if "time" in more:
        known = "; ".join(book.TIMES.values()).split("; ")
        time = next(t for t in known if t.startswith(more["time"] + " = "))
        parts["time"] = book.linked("time", *time.split(" = "))
    if "place" in more:
        place = book.PLACES[more["place"]]
        parts["place"] = book.linked("place", *place.split(" = "))
    parts["stop"] = book.linked("stop", ".", ".")
    return book.arrange(parts, front, more.get("late", False))


MAN, MEN = ("Mann", False), ("Mann", True)
APPLE = ("Apfel", False, "ein")


@pytest.mark.parametrize(
    "pair, de, en, links",
    [
        (build(MAN, "essen", ("Apfel", False)),
         "der Mann isst den Apfel .", "the man eats the apple .",
         "0-0 1-1 2-2 3-3 4-4 5-5"),
        (build(MAN, "essen", APPLE, front="time", time="heute",
               place="Garten"),
         "heute isst der Mann im Garten einen Apfel .",
         "today the man eats an apple in the garden .",
         "0-0 1-3 2-1 3-2 4-6 4-7 5-8 6-4 7-5 8-9"),
        (build(MEN, "aufmachen", ("Haustür", False), time="am Morgen"),
         "die Männer machen am Morgen die Haustür auf .",
         "the men open the front door in the morning .",
         "0-0 1-1 2-2 3-6 3-7 4-8 5-3 6-4 6-5 7-2 8-9"),
        (build(MAN, "aufmachen", ("Kiste", False), "perfect"),
         "der Mann hat die Kiste aufgemacht .",
         "the man has opened the box .",
         "0-0 1-1 2-2 3-4 4-5 5-3 6-6"),
        (build(MAN, "essen", APPLE, "past", time="gestern"),
         "der Mann hat gestern einen Apfel gegessen .",
         "the man ate an apple yesterday .",
         "0-0 1-1 2-2 3-5 4-3 5-4 6-2 7-6"),
        (build(MAN, "abholen", ("Junge", False), "wollen", time="heute"),
         "der Mann will heute den Jungen abholen .",
         "the man wants to pick up the boy today .",
         "0-0 1-1 2-2 2-3 3-8 4-6 5-7 6-4 6-5 7-9"),
        (build(MAN, "anschauen", ("Apfelbaum", True, "ein", "groß")),
         "der Mann schaut große Apfelbäume an .",
         "the man looks at big apple trees .",
         "0-0 1-1 2-2 2-3 3-4 4-5 4-6 5-2 5-3 6-7"),
        (build(MAN, "geben", APPLE, time="heute", recipient=("Kind", False)),
         "der Mann gibt dem Kind heute einen Apfel .",
         "the man gives the child an apple today .",
         "0-0 1-1 2-2 3-3 4-4 5-7 6-5 7-6 8-8"),
        (build(MAN, "geben", APPLE, "können", time="heute", late=True,
               recipient=("Kind", False, "ein"), front="time"),
         "heute kann der Mann einem Kind einen Apfel geben .",
         "today the man can give a child an apple .",
         "0-0 1-3 2-1 3-2 4-5 5-6 6-7 7-8 8-4 9-9"),
        (build(MEN, "vorlesen", ("Märchen", False), "perfect",
               place="Park", front="place", recipient=("Mädchen", True)),
         "im Park haben die Männer den Mädchen das Märchen vorgelesen .",
         "in the park the men have read the girls the fairy tale .",
         "0-0 0-1 1-2 2-5 3-3 4-4 5-7 6-8 7-9 8-10 8-11 9-6 10-12"),
    ],
)  # fmt: skip
def test_sentences_and_alignments_written_by_hand(pair, de, en, links):
    assert (pair.de, pair.en) == (de, en)
    pairs = (link.split("-") for link in links.split())
    assert pair.alignment == tuple((int(i), int(j)) for i, j in pairs)


# ------------------------------------------------------------------ the corpus


def test_counts_and_lengths(corpus, everything):
    counts = {part: len(pairs) for part, pairs in corpus.items()}
    assert counts == {"train": 24_000, "val": 500, "test": 1_000}
    for pair in everything:
        assert isinstance(pair, book.AlignedPair)
        for side in (pair.de, pair.en):
            assert 4 <= len(side.split()) <= 14
            assert side == " ".join(side.split())
            assert side.endswith(" .")


def test_vocabulary_has_the_size_that_the_text_gives(everything):
    assert len({w for p in everything for w in p.de.split()}) == 317
    assert len({w for p in everything for w in p.en.split()}) == 251


def test_translation_is_one_to_one(everything):
    assert len({pair.de for pair in everything}) == len(everything)
    assert len({pair.en for pair in everything}) == len(everything)


def test_translation_is_one_to_one_beyond_the_corpus():
    rng = random.Random(7)
    triples = book.split_triples(rng)["train"]
    few = rng.sample(triples, 100)  # many sentences of few triples collide
    there, back = {}, {}
    for _ in range(30_000):
        pair = book.draw_pair(rng, rng.choice(few))
        assert there.setdefault(pair.de, pair.en) == pair.en
        assert back.setdefault(pair.en, pair.de) == pair.de


def find_triple(pair):
    """Subject, verb and object, read off the German surface alone."""
    sentence = f" {pair.de} "
    adverbials = "; ".join([*book.TIMES.values(), *book.PLACES.values()])
    for adverbial in adverbials.split("; "):
        sentence = sentence.replace(f" {adverbial.split(' = ')[0]} ", " ", 1)
    words = sentence.split()
    lemmas = {}
    for noun in book.NOUNS.values():
        for form in (noun.singular, noun.plural, noun.plural + "n"):
            lemmas.setdefault(form, noun.singular)
    nouns = [lemmas[word] for word in words if word in lemmas]
    verbs = set()
    finite = {form for a in book.AUXILIARIES.values() for form in a}
    finite = {form.split()[0] for form in finite}
    for verb in book.VERBS.values():
        last = words[-2]
        compound = last in (verb.participle, verb.infinitive)
        if finite & set(words):
            found = compound
        elif verb.particle:
            found = last == verb.particle and bool(
                {verb.singular, verb.plural} & set(words)
            )
        else:
            found = bool({verb.singular, verb.plural} & set(words))
            found = found and last in lemmas
        if found:
            verbs.add(verb.infinitive)
    assert len(verbs) == 1, (pair.de, verbs)
    assert len(nouns) == 2 + (verbs <= set(book.TAKE_RECIPIENT)), pair.de
    return nouns[0], verbs.pop(), nouns[-1]


def test_triples_of_val_and_test_are_unseen(corpus):
    found = {
        part: {find_triple(pair) for pair in pairs}
        for part, pairs in corpus.items()
    }
    assert not found["train"] & found["val"]
    assert not found["train"] & found["test"]
    assert not found["val"] & found["test"]
    planned = book.split_triples(random.Random(0))
    for part in found:
        assert found[part] <= set(planned[part])
    assert len(found["test"]) > 250


@pytest.mark.parametrize("side", ["de", "en"])
def test_every_held_out_word_is_in_training(corpus, side):
    def words(part):
        sentences = (getattr(pair, side) for pair in corpus[part])
        return {word for sentence in sentences for word in sentence.split()}

    assert words("val") <= words("train")
    assert words("test") <= words("train")


@pytest.mark.parametrize("side", ["de", "en"])
def test_tokenizer_cuts_each_sentence_at_its_spaces(everything, side):
    for pair in everything:
        sentence = getattr(pair, side)
        assert book.tokenize(sentence, side) == sentence.split()


def test_all_words_are_aligned_and_positions_valid(everything):
    for de, en, alignment in everything:
        n, m = len(de.split()), len(en.split())
        assert list(alignment) == sorted(set(alignment))
        assert {i for i, _ in alignment} == set(range(n))
        assert {j for _, j in alignment} == set(range(m))
        assert alignment[-1] == (n - 1, m - 1)


def test_articles_are_aligned_with_articles(everything):
    allowed = {
        "einen": {"a", "an"}, "einem": {"a", "an"}, "einer": {"a", "an"},
        "das": {"the"}, "den": {"the"}, "dem": {"the"}, "die": {"the"},
        "diesem": {"this"}, "dieses": {"this"}, "meinem": {"my"},
        "im": {"in", "the"}, "am": {"in", "the", "on"}, ".": {"."},
        "hat": None, "will": {"wants", "to"}, "kann": {"can"},
        "Haustür": {"front", "door"}, "Apfelbaum": {"apple", "tree"},
    }  # fmt: skip
    for pair in everything:
        de, en = pair.de.split(), pair.en.split()
        for i, j in pair.alignment:
            expected = allowed.get(de[i])
            assert expected is None or en[j] in expected, pair


def test_finite_verb_is_second(everything):
    """Before the verb: one phrase, which ends in a noun or an adverb."""
    finite = {w.split()[0] for a in book.AUXILIARIES.values() for w in a}
    for verb in book.VERBS.values():
        finite |= {verb.singular, verb.plural}
    times = "; ".join(book.TIMES.values()).split("; ")
    adverbials = {t.split(" = ")[0] for t in [*times, *book.PLACES.values()]}
    for pair in everything:
        words = pair.de.split()
        k = next(i for i, word in enumerate(words) if word in finite)
        before = " ".join(words[:k])
        nouns = [word for word in words[:k] if word[0].isupper()]
        assert before in adverbials or len(nouns) == 1, pair.de
        if before in adverbials:  # then the subject follows at once
            pieces = words[k + 1 : k + 4]
            assert any(word[0].isupper() for word in pieces), pair.de


def test_past_tense_goes_with_its_adverbials(everything):
    past = ("gestern", "letzte Woche", "letzten Sonntag")
    for pair in everything:
        is_past = any(adverb in pair.de for adverb in past)
        english = pair.en.split()
        if is_past:
            assert not {"has", "have", "can", "must", "may"} & set(english)
            assert {"hat", "haben"} & set(pair.de.split())


# ----------------------------------------------------------------- determinism

DIGEST = (
    "import annotated_transformer as book, hashlib; "
    "print(hashlib.sha256(repr(book.toy_corpus(1)).encode()).hexdigest())"
)


def test_same_seed_same_corpus_in_another_process():
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    there = subprocess.run(
        [sys.executable, "-c", DIGEST],
        env=environment, cwd=FOLDER, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    here = hashlib.sha256(repr(book.toy_corpus(1)).encode()).hexdigest()
    assert there.stdout.strip() == here


def test_seeds_differ_and_the_global_generator_is_left_alone(corpus):
    before = random.getstate()
    other = book.toy_corpus(2)
    assert random.getstate() == before
    assert other["train"][:10] != corpus["train"][:10]
    assert len({pair.en for part in other.values() for pair in part}) == 25_500
