"""Heads with a role: right places, right scores, clean removal."""

import pytest
import torch

import annotated_transformer as book

ENCODER, CROSS = "encoder self-attention", "cross-attention"


@pytest.fixture(scope="module")
def pairs():
    return book.toy_corpus()["test"][:30]


@pytest.fixture(scope="module")
def translator(pairs):
    """Untrained, and small."""
    torch.manual_seed(0)
    sides = ({w for p in pairs for w in text(p).split()}
             for text in (lambda p: p.de, lambda p: p.en))  # fmt: skip
    vocabs = [book.Vocabulary([*book.SPECIALS, *sorted(s)]) for s in sides]
    sizes = dict(N=2, d_model=16, d_ff=32, h=4, dropout=0.0)
    return book.new_translator(vocabs, ("de", "en"), sizes)


def words_of(pair, wanted):
    """{word that asks: right words} of German places."""
    words = pair.de.split()
    return {words[q]: {words[k] for k in keys} for q, keys in wanted.items()}


# ------------------------------------------------------------------- the roles


def pair(de, en, links):
    """`links`: words that belong together, as "macht auf=opens; …"."""
    german, english = de.split(), en.split()
    places = set()
    for link in links.split("; "):
        left, right = (side.split() for side in link.split("="))
        places |= {(german.index(g), english.index(e))
                   for g in left for e in right}  # fmt: skip
    return book.AlignedPair(de, en, tuple(sorted(places)))


TORN = pair(
    "am Abend macht der alte Mann diese Tür auf .",
    "in the evening this old man opens a door .",
    "am=in; Abend=evening; macht auf=opens; alte=old; Mann=man; Tür=door; .=.",
)


def test_roles_of_a_sentence_by_hand():
    roles = book.encoder_roles(TORN)
    words = {role: words_of(TORN, roles[role]) for role in roles}
    assert words["article: noun"] == {"der": {"Mann"}, "diese": {"Tür"}}
    assert words["noun: article"] == {"Mann": {"der"}, "Tür": {"diese"}}
    assert words["verb: subject"] == {"macht": {"Mann"}}
    assert words["verb: its rest"] == {"macht": {"auf"}}
    assert words["hat: time"] == {}
    assert roles["previous"][3] == {2} and 0 not in roles["previous"]
    assert roles["next"][3] == {4} and 9 not in roles["next"]
    cross = book.cross_roles(TORN)
    assert cross["written"][6] == {2, 8} and cross["read"][7] == {2, 8}
    assert cross["torn verb: first"] == {6: {2}}
    assert cross["torn verb: last"] == {6: {8}}
    decoder = book.decoder_roles(TORN)
    assert decoder["itself"][10] == {10} and 11 not in decoder["itself"]


def test_hat_looks_at_the_time_wherever_it_stands():
    for text, time in (
        ("gestern hat der Mann den Hund gesucht .", {"gestern"}),
        ("der Mann hat den Hund letzte Woche gesucht .", {"letzte", "Woche"}),
        ("der Mann hat den Hund gesucht .", None),
        ("heute sucht der Mann den Hund .", None),
    ):
        one = book.AlignedPair(text, ". .", ())
        roles = book.encoder_roles(one)
        assert words_of(one, roles["hat: time"]) == (
            {"hat": time} if time else {}
        )
        (subject,) = words_of(one, roles["verb: subject"]).values()
        assert subject == {"Mann"}


def test_all_places_are_in_the_sentence():
    for one in book.toy_corpus()["test"]:
        sizes = {
            ENCODER: (len(one.de.split()), len(one.de.split())),
            CROSS: (len(one.en.split()) + 1, len(one.de.split())),
            "decoder self-attention": [len(one.en.split()) + 1] * 2,
        }
        for kind, of in book.ROLES.items():
            for role, wanted in of(one).items():
                for query, keys in wanted.items():
                    assert 0 <= query < sizes[kind][0], (one, role)
                    assert keys, (one, role)
                    assert all(0 <= k < sizes[kind][1] for k in keys)
        subject = book.encoder_roles(one)["verb: subject"]
        ((verb, (noun,)),) = subject.items()
        assert one.de.split()[verb] in book.FINITE
        assert one.de.split()[noun][0].isupper()


# ------------------------------------------------------------------ the scores


def test_a_head_that_looks_right_scores_one_and_another_nothing():
    places = torch.arange(5)
    previous = torch.zeros(5, 5)
    previous[places, (places - 1).clamp(0)] = 1
    weights = torch.stack([previous, torch.eye(5)])[None]  # (1, 2, 5, 5)
    wanted = {i: {i - 1} for i in range(1, 5)}
    assert (book.role_hits(weights, wanted) / 4).tolist() == [[1, 0]]
    either = {i: {i - 1, i} for i in range(1, 5)}
    assert (book.role_hits(weights, either) / 4).tolist() == [[1, 1]]
    assert book.role_hits(weights, {}).tolist() == [[0, 0]]


class Previous:
    """An attention whose head 0 looks back, and head 1 at itself."""

    def __init__(self, places):
        back = torch.eye(places).roll(-1, dims=-1)  # 0 looks at the last
        self.weights = torch.stack([back, torch.eye(places)])[None]


def test_scores_over_sentences_find_the_constructed_head(
    translator, pairs, monkeypatch
):
    def constructed(model, kind):
        places = real(model, kind)[0].weights.size(-1)
        return [Previous(places)]

    real = book.attentions
    monkeypatch.setattr(book, "attentions", constructed)
    roles = {k: book.ROLES[k] for k in (ENCODER, "decoder self-attention")}
    scores, asked = book.role_scores(translator, pairs, roles)
    for kind in roles:
        assert scores[kind, "previous"].tolist() == [[1, 0]]
        assert scores[kind, "itself"].tolist() == [[0, 1]]
    words = sum(len(p.de.split()) for p in pairs)
    assert asked[ENCODER, "itself"] == words
    assert asked[ENCODER, "previous"] == words - len(pairs)


def test_scores_are_shares_and_the_mean_of_single_sentences(translator, pairs):
    scores, asked = book.role_scores(translator, pairs)
    assert len(scores) == 14
    for share in scores.values():
        assert share.shape == (2, 4)
        assert 0 <= share.min() and share.max() <= 1
    role = (CROSS, "written")
    each = [book.role_scores(translator, [p]) for p in pairs]
    hits = sum(s[role] * n[role] for s, n in each)
    torch.testing.assert_close(hits / asked[role], scores[role])


def test_alignment_is_counted_as_before(translator, pairs):
    """Role "written" is what the section before measured."""
    scores, _ = book.role_scores(translator, pairs)
    earlier = book.alignment_accuracy(translator, pairs)
    torch.testing.assert_close(scores[CROSS, "written"], earlier)


# --------------------------------------------------------------------- removal


def test_a_removed_head_is_missing_and_no_other(translator):
    model = translator.model
    x = torch.randn(2, 5, 16)
    for kind in book.KINDS:
        a = book.attentions(model, kind)[1].eval()
        whole, weights = a(x, x, x).detach(), a.weights
        Q, K, V = (a.split(w(x)) for w in (a.W_Q, a.W_K, a.W_V))
        heads, _ = book.attention(Q, K, V)  # (B, H, T, K)
        part = heads[:, 2] @ a.W_O.weight[:, 8:12].T
        with book.without_heads(model, [(kind, 1, 2)]):
            rest = a(x, x, x).detach()
            torch.testing.assert_close(a.weights, weights)
        torch.testing.assert_close(whole - part, rest)
        assert not torch.allclose(whole, rest)
        with book.without_heads(model, [(kind, 1, h) for h in range(4)]):
            assert a(x, x, x).abs().max() == 0


def test_removal_ends_with_its_block_even_after_an_error(translator):
    model = translator.model
    before = {n: w.clone() for n, w in model.state_dict().items()}
    with pytest.raises(KeyError):
        with book.without_heads(model, [(ENCODER, 0, 0), (CROSS, 1, 3)]):
            changed = [n for n, w in model.state_dict().items()
                       if not w.equal(before[n])]  # fmt: skip
            assert changed == [
                "encoder.layers.0.self_attention.W_O.weight",
                "decoder.layers.1.cross_attention.W_O.weight",
            ]
            raise KeyError
    for name, weight in model.state_dict().items():
        assert weight.equal(before[name])


@pytest.mark.parametrize(
    "layer, head", [(1, 4), (1, -1), (2, 0), (-1, 0), (9, 0)]
)
def test_a_head_that_is_not_there_is_not_removed_in_silence(
    translator, layer, head
):
    before = {n: w.clone() for n, w in translator.model.state_dict().items()}
    heads = [(CROSS, 0, 0), (CROSS, layer, head)]
    said = f"no head {head} in layer {layer} of the {CROSS}.* from 0"
    with pytest.raises(book.InputError, match=said):
        with book.without_heads(translator.model, heads):
            pass
    for name, weight in translator.model.state_dict().items():
        assert weight.equal(before[name])


def test_without_cross_attention_the_source_does_not_matter(translator, pairs):
    translator.model.eval()
    src = [translator.encode_pair(p.de.split(), [])[0] for p in pairs[:2]]
    tgt = torch.tensor([[book.BOS, 5, 6]])
    heads = [(CROSS, n, h) for n in range(2) for h in range(4)]
    with book.without_heads(translator.model, heads):
        one, other = (translator.model(torch.tensor([s]), tgt) for s in src)
    torch.testing.assert_close(one, other)


# ------------------------------------------------------------------ the claims


@pytest.fixture
def as_toy(translator, monkeypatch):
    """The small model in the place of the trained one."""
    monkeypatch.setattr(book, "toy_translator", lambda: (translator, []))
    caches = book.roles_of, book.untrained_toy
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_an_untrained_model_has_no_heads_with_a_role(as_toy):
    for name in ("heads_learn_different_tasks", "heads_bridge_distance"):
        claim = book.CLAIMS[name]
        assert claim.verdict(sentences=20)[0] == "not reproduced"


def test_the_best_head_is_chosen_on_other_sentences(as_toy, monkeypatch):
    role = (CROSS, "written")
    scores = {
        "val": {role: torch.tensor([[0.1, 0.9], [0.2, 0.3]])},
        "test": {role: torch.tensor([[0.4, 0.5], [0.6, 0.7]])},
    }
    monkeypatch.setattr(
        book, "roles_of", lambda trained, part, n: (scores[part], {})
    )
    assert book.best_head(role) == ((0, 1), 0.5)


def test_sentences_are_counted_in_their_groups(as_toy, pairs, monkeypatch):
    def half_right(sentences):
        assert cross.W_O.weight[:, 4:8].abs().max() == 0
        return [p.en.split() if i % 2 else ["no"]
                for i, p in enumerate(pairs)]  # fmt: skip

    monkeypatch.setattr(
        book.toy_translator()[0], "translate_words", half_right
    )
    cross = book.attentions(book.toy_translator()[0].model, CROSS)[1]
    groups = {"odd": [1, 3], "even": [0, 2, 4], "mixed": [0, 1]}
    shares = book.exact_share([(CROSS, 1, 1)], pairs, groups)
    assert shares == {"odd": 1, "even": 0, "mixed": 0.5}
    assert book.exact_share([(CROSS, 1, 1)], pairs) == {"all": 0.5}
