"""Trees as sequences: one right tree a sentence, scores by definition."""

import math
import random
from collections import Counter

import pytest

import annotated_transformer as book


@pytest.fixture(scope="module")
def bank():
    return book.treebank()


@pytest.fixture(scope="module")
def table():
    return book.by_right_side(book.read_grammar())


def reading(sentence, table):
    """(how many trees, the tokens of the best) of a sentence."""
    number, _, tree = book.readings(sentence.split(), table)
    return number, tree and book.brackets(tree)


# ----------------------------------------------------------------- the grammar


def test_each_sentence_has_one_reading_and_it_is_its_tree(bank, table):
    for tree in bank["train"][:200] + bank["test"] + bank["longer"]:
        words = book.leaves(book.brackets(tree))
        number, _, best = book.readings(words, table)
        assert number == 1 and best == tree


def test_no_shape_of_the_test_is_in_training(bank):
    shapes = {p: {book.shape(tree) for tree in bank[p]} for p in bank}
    assert not shapes["train"] & shapes["test"]
    assert not shapes["train"] & shapes["longer"]
    for part, low, high in (
        ("train", 6, 12), ("test", 6, 12), ("longer", 13, 16),
    ):  # fmt: skip
        lengths = {shape.split().count("w") for shape in shapes[part]}
        assert min(lengths) >= low and max(lengths) <= high
    known, asked = (
        {w for t in bank[p] for w in book.leaves(book.brackets(t))}
        for p in ("train", "test")
    )
    assert asked <= known


@pytest.mark.parametrize(
    "sentence, number",
    [
        ("the dogs sleep", 1),
        ("the dogs sleeps", 0),  # no agreement
        ("dogs the sleep", 0),
        ("the man says that the dog sleeps and the king runs", 2),
        ("the dogs that the men see run and sleep", 1),
        ("the friend of the king that sleeps runs", 2),  # who sleeps?
        ("the friend of the kings that sleeps runs", 1),
        ("the man says with the camera", 0),
    ],
)
def test_readings_are_counted(sentence, number, table):
    assert reading(sentence, table)[0] == number


PAIRS = """
the man watches the child with the camera
the man watches the child with the hat
the friend of the dogs that sleeps knows the king
the friend of the dogs that sleep knows the king
the man sees a dog and the cat
the man sees a dog and the cat sleeps
"""


def test_a_word_or_an_agreement_or_what_follows_decides(table):
    lines = PAIRS.strip().splitlines()
    found = [reading(line, table) for line in lines]
    assert [number for number, _ in found] == [1] * 6
    camera, hat, sleeping, dogs, objects, clauses = (
        book.spans(tokens, line.split())
        for line, (_, tokens) in zip(lines, found)
    )
    assert hat["NP", 3, 8] and not camera["NP", 3, 8]
    assert camera["NP", 3, 5] and camera["PP", 5, 8]
    assert sleeping["NP", 0, 5] and not sleeping["NP", 3, 7]
    assert dogs["NP", 3, 7] and not dogs["NP", 0, 5]
    assert objects["NP", 3, 8] and not clauses["NP", 3, 8]
    assert clauses["S", 0, 5] and clauses["S", 6, 9]


def test_patterns_of_a_pair_have_different_trees(table):
    shapes = {}
    for name, pattern in book.PATTERNS.items():
        trees = book.of_pattern(pattern, 20)
        for tree in trees:
            words = book.leaves(book.brackets(tree))
            assert book.readings(words, table)[0] == 1
        shapes[name] = {book.shape(tree) for tree in trees}
        assert len(shapes[name]) == 1
    assert len(set.union(*shapes.values())) == len(book.PATTERNS)


def test_readings_of_a_row_are_the_catalan_numbers():
    """With S -> S S | and, n words have Catalan(n - 1) trees."""
    table = book.by_right_side({"S": {("S", "S"): 1, ("and",): 3}})
    for n, trees in enumerate((1, 1, 2, 5, 14, 42), 1):
        number, score, tree = book.readings(["and"] * n, table)
        assert number == trees
        assert math.isclose(score, n * math.log(3 / 4) - (n - 1) * math.log(4))
        assert book.leaves(book.brackets(tree)) == ["and"] * n


def test_the_best_reading_is_the_likelier_one():
    """For old + old, one rule against the other."""
    for weights, label in (((3, 1), "A"), ((1, 3), "B")):
        rules = {"S": dict(zip((("A",), ("B",)), weights))}
        rules |= {"A": {("Adj", "Adj"): 1}, "B": {("Adj", "Adj"): 1}}
        # a unary rule over phrases is not in the chart, so ask by two words
        rules["S"] = {("A", "and"): weights[0], ("B", "and"): weights[1]}
        words = ["old", "old", "and"]
        found = book.readings(words, book.by_right_side(rules))
        assert found[0] == 2 and found[2][1][0] == label


def test_rules_are_counted_without_what_follows_the_slash():
    noun = ("NP/s", ("Det/s", "a"), ("+Noun/s", ("Noun/s", "dog")))
    tree = ("S", noun, ("VP/s", ("Rest/s", "sleeps")))
    assert book.counted_rules([tree, tree]) == {
        "S": Counter({("NP", "VP"): 2}),
        "NP": Counter({("Det", "+Noun"): 2}),
        "+Noun": Counter({("Noun",): 2}),
        "VP": Counter({("Rest",): 2}),
    }


def test_every_rule_and_word_is_of_use():
    rules = book.read_grammar()
    used = {s for options in rules.values() for r in options for s in r}
    assert used | {"S"} == rules.keys() | book.WORDS_OF.keys()
    tree = book.draw_tree(random.Random(1), rules)
    assert tree == book.draw_tree(random.Random(1), rules)


# ------------------------------------------------------------------ the scores


def test_a_tree_is_well_formed_and_keeps_its_words(bank):
    for tree in bank["test"][:100]:
        tokens = book.brackets(tree)
        words = book.leaves(tokens)
        found = book.spans(tokens, words)
        assert found["S", 0, len(words)] == 1
        assert found.total() == (len(tokens) - len(words)) / 2


@pytest.mark.parametrize(
    "tokens",
    [
        "", "a", "(S a", "a )S", ")S a (S", "(S )S", "(S a )NP", "(S b )S",
        "(S a a )S", "(S a )S (S )S", "(S a )S a", "a (S a )S",
        "(S (NP )NP a )S", "(S (NP a )S )NP",
    ],
)  # fmt: skip
def test_what_is_no_tree_of_the_sentence_has_no_spans(tokens):
    assert book.spans(tokens.split(), ["a"]) is None


def test_a_tree_has_one_root_and_no_word_outside():
    for tokens in ("(S a )S (S a )S", "(S a )S a", "a (S a )S", "a a"):
        assert book.spans(tokens.split(), ["a", "a"]) is None
    assert book.spans("(S (S a )S a )S".split(), ["a", "a"])


def test_scores_are_over_all_sentences_together():
    right = ["(S (NP a )NP (VP b )VP )S", "(S a )S"]  # 3 + 1 spans
    given = ["(S a (VP b )VP )S", "(S (NP a )NP )S"]  # 2 of 2, 1 of 2
    scores = book.parse_scores(*([t.split() for t in side]
                                 for side in (given, right)))  # fmt: skip
    assert scores["precision"] == 3 / 4 and scores["recall"] == 3 / 4
    assert scores["F1"] == 3 / 4
    assert scores["well-formed"] == 1 and scores["exact"] == 0


def test_scores_are_of_as_many_trees_as_references():
    with pytest.raises(ValueError, match="shorter"):
        book.parse_scores(["(S a )S".split()], [])


def test_a_span_counts_as_often_as_it_is_there():
    twice, once = "(S (S a )S )S".split(), "(S a )S".split()
    assert book.parse_scores([twice], [once])["precision"] == 1 / 2
    assert book.parse_scores([once], [twice])["recall"] == 1 / 2
    assert book.parse_scores([twice], [twice])["F1"] == 1


def test_what_is_ill_formed_costs_recall_and_nothing_divides_by_zero():
    right = ["(S a )S".split(), "(S a )S".split()]
    scores = book.parse_scores([right[0], ["(S", "a"]], right)
    assert scores["precision"] == 1 and scores["recall"] == 1 / 2
    assert scores["well-formed"] == scores["exact"] == 1 / 2
    assert set(book.parse_scores([[]], right[:1]).values()) == {0}
    assert set(book.parse_scores([], []).values()) == {0}


def test_the_right_trees_score_one_and_so_do_no_others(bank):
    right = [book.brackets(tree) for tree in bank["test"][:50]]
    assert set(book.parse_scores(right, right).values()) == {1}
    scores = book.parse_scores(right[1:] + right[:1], right)
    assert scores["exact"] == scores["F1"] == 0  # trees of other sentences


def chain(depth, top="NP"):
    """A tree whose shape is its depth, and one of other labels."""
    inside = [f"({top}"] * depth + ["b"] + [f"){top}"] * depth
    return ["(S", "a", *inside, ")S"]


def test_a_difference_is_certain_only_where_all_drawings_agree():
    rights = [chain(depth) for depth in range(1, 41)]
    wrongs = [chain(depth, "VP") for depth in range(1, 41)]
    for ones, others, sign in ((rights, wrongs, 1), (wrongs, rights, -1)):
        low, high = book.difference_by_drawings(ones, others, rights, "exact")
        assert low == high == sign
    mixed = [
        [pair[(i + first) % 2] for i, pair in enumerate(zip(rights, wrongs))]
        for first in (0, 1)
    ]
    low, high = book.difference_by_drawings(*mixed, rights, "exact")
    assert low < 0 < high and abs(low + high) < 0.05
    # ±1 each, of 40: the mean of 40 has a deviation of 1/√40
    assert high == pytest.approx(1.96 / 40**0.5, rel=0.15)
    low, high = book.difference_by_drawings(*mixed, rights, "F1")
    assert low < 0 < high


def test_sentences_of_one_shape_are_drawn_together():
    """Ten times as many sentences of the same shapes tell nothing more."""
    rights = [chain(depth) for depth in range(1, 21)]
    wrongs = [chain(depth, "VP") for depth in range(1, 21)]
    ones, others = rights[:12] + wrongs[12:], wrongs[:12] + rights[12:]
    few = book.difference_by_drawings(ones, others, rights, "exact")
    many = book.difference_by_drawings(
        ones * 10, others * 10, rights * 10, "exact"
    )
    assert few == many and few[0] < 0 < few[1]


def test_what_may_follow_is_what_can_still_become_a_tree():
    words, tree = ["a", "b"], "(S (NP a )NP b )S".split()
    for i in range(len(tree) + 1):
        assert book.may_become_a_tree(tree[:i], words) == (i > 0)
    for wrong in ("(S )S", "(S b", "a", "(S a )NP", "(S a )S", "(S a b b",
                  "(S (NP a )S", "(S a b )S (S"):  # fmt: skip
        assert not book.may_become_a_tree(wrong.split(), words)
    assert book.may_become_a_tree("(S b a".split(), words, of_it=False)
    assert not book.may_become_a_tree("(S )S".split(), words, of_it=False)


def test_the_baseline_s_trees_are_counted_once_each(bank):
    """No tree of the rules differs from another in what it hides alone."""
    tables = [
        book.by_right_side(book.counted_rules(bank["train"])),
        book.by_right_side(book.read_grammar()),
    ]
    for sentence, number in (
        ("the dogs sleep", 1),
        ("my dogs see the cats", 1),
        ("the friend of the king that sleeps runs", 2),
        ("the friend of the kings that sleeps runs", 2),  # by agreement, 1
    ):
        found = book.readings(sentence.split(), tables[0], book.without_slash)
        assert found[0] == number, sentence
    assert book.readings(sentence.split(), tables[1])[0] == 1


# ------------------------------------------------------------------ the parser


@pytest.fixture
def small_bank(bank, monkeypatch):
    """Twenty short sentences to learn by heart."""
    short = sorted(bank["train"], key=lambda t: len(book.brackets(t)))[:20]
    monkeypatch.setattr(book, "treebank", lambda: {"train": short})
    yield short
    book.parser_model.cache_clear()


def test_the_parser_learns_what_it_is_shown(small_bank, one_thread):
    recipe = dict(warmup=30, factor=0.4, batch_tokens=200, max_tokens=200)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(book, "PARSER_RECIPE", book.Recipe(**recipe))
        for updates, low, high in ((0, 0, 0), (150, 0.9, 1)):
            translator = book.parser_model(updates)
            scores = book.parse_scores(*book.parse(translator, small_bank))
            assert low <= scores["exact"] <= high, updates


def test_what_is_said_of_table_4_follows_from_its_numbers(monkeypatch):
    def verdict(name):
        return book.CLAIMS[name].verdict()[0]

    name = "better_than_all_but_one"
    found = book.CLAIMS[name].verdict()[1]
    assert verdict(name) == "not reproduced"
    assert "Luong" in found and "Dyer" in found and "McClosky" not in found
    monkeypatch.setitem(book.TABLE_4, "other tasks", {"Luong": 92.6})
    assert verdict(name) == "verified"
    few = book.TABLE_4["the 40,000 trees"]
    monkeypatch.setitem(few, "Transformer", 90.4)  # no better than the same
    assert verdict("beats_a_parser_made_for_it") == "not reproduced"
    assert verdict("recurrent_models_need_more") == "verified"
    monkeypatch.setitem(few, "Vinyals & Kaiser", 93.3)
    assert verdict("recurrent_models_need_more") == "not reproduced"
