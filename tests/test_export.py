"""A model in production: products in 8 bits, and CTranslate2's own form."""

import contextlib
import io
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import contents, needed, refused, run, writers_made

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, UNK

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = dict(N=2, d_model=32, d_ff=64, h=4, dropout=0.0)
TEXTS = [pair.de for pair in book.toy_corpus()["test"][:40]]


def lively(vocabs, seed=0, both=False, **changes):
    """A translator that nobody trained, whose outputs differ in length."""
    torch.manual_seed(seed)
    shared = vocabs[0] is vocabs[1]
    config = book.Config(*map(len, vocabs), shared=shared, **SIZES | changes)
    model = book.Transformer(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
            else:
                weight.add_(0.1 * torch.randn_like(weight))
        for layer in model.decoder.layers:
            layer.cross_attention.W_O.weight *= 6
        model.tgt_embedding.weight[EOS] *= 2
    return book.Translator(model, vocabs, ("de", "en"), both)


def words(seed=0, **changes):
    """The same with a vocabulary of whole words for each language."""
    pairs = book.toy_corpus()["train"][:300]
    vocabs = [
        book.Vocabulary.build([text.split() for text in side])
        for side in zip(*[(pair.de, pair.en) for pair in pairs])
    ]
    return lively(vocabs, seed, **changes)


def tagged():
    """Pieces with a tag for each language, as `train --both` makes them."""
    train = book.toy_corpus()["train"]
    texts = [text for pair in train[:500] for text in (pair.de, pair.en)]
    return book.Pieces.learn(texts, 200, ["<2de>", "<2en>"])


KINDS = {
    "pieces, post-norm": lambda: lively([book.toy_pieces()] * 2),
    "pieces, pre-norm": lambda: lively(
        [book.toy_pieces()] * 2, norm_first=True
    ),
    "words, post-norm": words,
    "words, pre-norm": lambda: words(norm_first=True),
    "both directions": lambda: lively([tagged()] * 2, both=True),
}


def written(folder, tokens, **options):
    """What CTranslate2 writes, greedily, from an exported folder."""
    model = needed("ctranslate2").Translator(str(folder), intra_threads=1)
    given = dict(beam_size=1, min_decoding_length=0, max_decoding_length=300)
    found = model.translate_batch(tokens, **given | options)
    return [result.hypotheses[0] for result in found]


def export(capsys, translator, place, *more):
    """Save a translator and export it by the command: the new folder."""
    needed("ctranslate2")
    book.save_translator(translator, place / "saved")
    status, output, errors = run(
        capsys, "export", "--format", "ctranslate2",
        "--model", place / "saved", "--out", place / "out", *more,
    )  # fmt: skip
    assert (status, output) == (0, "") and "done" in errors
    return place / "out"


# ----------------------------------------------------------- CTranslate2 equal


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_model_writes_what_ours_writes(kind, capsys, tmp_path):
    translator = KINDS[kind]()
    folder = export(capsys, translator, tmp_path)
    tokens = [translator.split(text) for text in TEXTS]
    # Source + 50 is one limit for each sentence here, one for all there.
    ours = translator.search(tokens, book.greedy)
    limits = [len(row) + 1 + 50 for row in tokens]
    theirs = [
        text[:limit] for text, limit in zip(written(folder, tokens), limits)
    ]
    assert theirs == [translator.tgt_vocab.decode(row) for row in ours]
    assert len({len(row) for row in theirs}) > 5
    assert len(set(map(tuple, theirs))) > 20


def test_the_tag_of_the_other_direction_gives_another_text(capsys, tmp_path):
    translator = KINDS["both directions"]()
    folder = export(capsys, translator, tmp_path)
    forth, back = translator, translator.reversed()
    one, other = (list(map(way.split, TEXTS)) for way in (forth, back))
    assert one[0][0] == "<2en>" and other[0][0] == "<2de>"
    assert one[0][1:] == other[0][1:]
    short = partial(written, folder, max_decoding_length=9)
    assert short(one) != short(other)


def test_the_lines_in_the_book_translate(capsys, tmp_path):
    translator = KINDS["pieces, pre-norm"]()
    folder = export(capsys, translator, tmp_path)
    source = Path(book.__file__).read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^# ```python\n(.*?)^# ```\n", source)
    [block] = [b for b in blocks if "german-english" in b]
    lines = re.sub(r"(?m)^# ?", "", block)
    lines = lines.replace("german-english", str(folder))
    assert lines.count(str(folder)) == 2
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(lines, {})
    assert len(shown.getvalue().splitlines()) == 1
    assert "⁇" not in shown.getvalue()


def test_special_tokens_are_never_written(tmp_path):
    translator = KINDS["pieces, post-norm"]()
    [[word, *_]] = translator.search([translator.split(TEXTS[0])], book.greedy)
    with torch.no_grad():  # it would like nothing better than these
        table = translator.model.tgt_embedding.weight
        table[[PAD, UNK]] = 3 * table[word]
    needed("ctranslate2")
    book.export_ctranslate2(translator, tmp_path / "out")
    tokens = [translator.split(text) for text in TEXTS[:10]]
    for row in written(tmp_path / "out", tokens, beam_size=3):
        assert not {"<pad>", "<s>", "<unk>"} & set(row)


def test_a_long_source_is_read_to_its_end(tmp_path):
    translator = KINDS["pieces, pre-norm"]()
    needed("ctranslate2")
    book.export_ctranslate2(translator, tmp_path / "out")
    tokens = [(translator.split(" ".join(TEXTS)) * 3)[:1020]]
    assert len(tokens[0]) == 1020
    [ours] = translator.search(tokens, book.greedy)
    [theirs] = written(tmp_path / "out", tokens, max_decoding_length=50)
    assert theirs == translator.tgt_vocab.decode(ours)[:50]


@pytest.mark.parametrize("kind", book.QUANTIZATIONS)
def test_every_kind_of_number_can_be_written_and_read(kind, tmp_path):
    ctranslate2 = needed("ctranslate2")
    translator = KINDS["pieces, post-norm"]()
    before = {k: w.clone() for k, w in translator.model.state_dict().items()}
    sizes = []
    for name in ("none", kind):
        folder = tmp_path / f"as {name}"
        if not folder.exists():
            book.export_ctranslate2(translator, folder, name)
        sizes.append((folder / "model.bin").stat().st_size)
    ctranslate2.Translator(str(folder))
    whole = 4 * book.parameter_count(translator.model)
    assert sizes[0] > whole
    saved = {"none": 0, "float16": 0.5}.get(kind, 0.4)
    assert sizes[1] <= sizes[0] - saved * whole
    after = translator.model.state_dict()
    assert all(after[k].equal(weight) for k, weight in before.items())


@pytest.mark.parametrize("beam", [1, 4])
def test_the_published_model_comes_out_as_ours(beam, tmp_path):
    needed("ctranslate2")
    translator = book.load_translator(book.published_model())
    book.export_ctranslate2(translator, tmp_path / "out")
    tokens = [translator.split(text) for text in TEXTS]
    how = dict(beam_size=beam, length_penalty=0)
    theirs = written(tmp_path / "out", tokens, **how)
    ours = translator.translate_words(tokens, beam, 0.0)
    assert sum(a != b for a, b in zip(ours, theirs)) <= 1
    other = translator.translate_words(tokens, 5 - beam, 0.0)
    assert sum(a != b for a, b in zip(ours, other)) > 10


def test_in_8_bits_the_published_model_comes_out_nearly_as_ours(
    capsys, tmp_path
):
    translator = book.load_translator(book.published_model())
    folder = export(capsys, translator, tmp_path, "--quantization", "int8")
    tokens = [translator.split(text) for text in TEXTS]
    ours, theirs = translator.translate_words(tokens), written(folder, tokens)
    # CTranslate2 goes its own way where the processor has no such products.
    quick = book.integer_sums()[0] is book.by_int_mm
    most = 20 if quick else len(TEXTS)
    assert 0 < sum(a != b for a, b in zip(ours, theirs)) < most


def test_real_captions_come_out_as_ours(data, tmp_path):
    needed("ctranslate2")
    translator = book.load_translator(book.published_model())
    book.export_ctranslate2(translator, tmp_path / "out")
    part = str(data / "multi30k"), "test_2016_flickr"
    pairs = book.corpus_part(*part, "de", "en")[:200]
    tokens = [translator.split(source) for source, _ in pairs]
    theirs = written(tmp_path / "out", tokens)
    ours = translator.translate_words(tokens)
    assert sum(a != b for a, b in zip(ours, theirs)) <= 2


# ------------------------------------------------------------ whole or not


def test_a_folder_that_exists_is_refused(capsys, tmp_path):
    message = refused(
        capsys, "export", "--format", "ctranslate2",
        "--model", tmp_path / "nowhere", "--out", tmp_path,
    )  # fmt: skip
    assert str(tmp_path) in message and "--out" in message
    assert not any(tmp_path.iterdir())


def test_the_missing_package_is_named(capsys, monkeypatch, tmp_path):
    for name in ("ctranslate2", "ctranslate2.specs"):
        monkeypatch.setitem(sys.modules, name, None)
    book.save_translator(words(), tmp_path / "saved")
    message = refused(
        capsys, "export", "--format", "ctranslate2",
        "--model", tmp_path / "saved", "--out", tmp_path / "new" / "out",
    )  # fmt: skip
    assert "pip install ctranslate2" in message
    assert not (tmp_path / "new").exists()


def test_an_export_that_fails_leaves_nothing(monkeypatch, tmp_path):
    needed("ctranslate2")
    from ctranslate2.specs import TransformerSpec

    def half(self, folder):
        (Path(folder) / "model.bin").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(TransformerSpec, "save", half)
    with pytest.raises(OSError, match=r"out: not written \(disk full\); make"):
        book.export_ctranslate2(words(), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_the_folder_holds_its_pieces(tmp_path):
    needed("ctranslate2")
    translator = KINDS["pieces, post-norm"]()
    book.export_ctranslate2(translator, tmp_path / "deep" / "out")
    files = contents(tmp_path / "deep" / "out")
    assert set(files) == {
        "config.json", "model.bin", "pieces.model", "shared_vocabulary.json",
    }  # fmt: skip
    assert files["pieces.model"] == book.toy_pieces().model


# ------------------------------------------------------------------- 8 bits


@pytest.mark.parametrize("kind", ["pieces, pre-norm", "words, post-norm"])
def test_in_use_no_product_is_left_in_32_bits(kind):
    """The float weights may go: only the embeddings are still looked up."""
    translator = KINDS[kind]()
    model = translator.model
    book.use_int8(model)
    before = translator.translate(TEXTS[:10], beam=3)
    loss = book.perplexity(model, [([5, 6, EOS], [BOS, 7, 8, EOS])])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.fill_(torch.nan)
    assert translator.translate(TEXTS[:10], beam=3) == before
    assert len(set(before)) > 3
    again = book.perplexity(model, [([5, 6, EOS], [BOS, 7, 8, EOS])])
    assert again == loss


def test_logits_are_in_8_bits_and_the_rows_looked_up_are_not():
    for shared in (True, False):
        torch.manual_seed(0)
        model = book.restless_model(shared=shared)
        src, tgt = torch.randint(4, 14, (2, 3, 5))
        with torch.no_grad():
            states = model.states(src, tgt)
            exact = model.tgt_embedding.logits(states)
            rows = model.tgt_embedding(tgt), model.src_embedding(tgt)
            book.use_int8(model)
            assert model.tgt_embedding(tgt).equal(rows[0])
            assert model.src_embedding(tgt).equal(rows[1])
            rounded = model.tgt_embedding.logits(states)
        off = (rounded - exact).norm() / exact.norm()
        assert 0 < off < 0.02
        assert (model.src_embedding is model.tgt_embedding) == shared


class Louder(book.Embedding):
    def logits(self, states):
        return 3 * super().logits(states)


class Turned(torch.nn.Linear):
    def forward(self, x):
        return -super().forward(x)


@pytest.mark.parametrize("own", [Louder, Turned, "hook"])
def test_8_bits_replace_no_formula_of_ones_own(own):
    model = book.restless_model()
    src, tgt = torch.randint(4, 14, (2, 2, 5))
    attention = model.decoder.layers[1].cross_attention
    if own == "hook":
        attention.W_K.register_forward_hook(lambda part, x, y: -y)
    else:
        part = model.tgt_embedding if own is Louder else attention.W_K
        part.__class__ = own
    before = model(src, tgt)
    with pytest.raises(book.InputError, match="of this model is your own"):
        book.use_int8(model)
    assert model(src, tgt).equal(before)  # nothing is half changed


class Sharper(book.MultiHeadAttention):
    def forward(self, query, key, value, mask=None):
        return super().forward(1.2 * query, key, value, mask)


def test_in_8_bits_too_a_writer_refuses_what_it_would_leave_out():
    model = book.load_translator(book.published_model()).model
    book.use_int8(book.exchange(model, {book.MultiHeadAttention: Sharper}))
    with pytest.raises(book.InputError, match="was changed in this model"):
        book.Writer(model)


@pytest.mark.parametrize("kind", ["pieces, pre-norm", "words, post-norm"])
def test_a_writer_in_8_bits_has_the_plain_forms_logits(kind):
    """Which are close to those in 32 bits, and no more than close."""
    model = KINDS[kind]().model
    src = torch.randint(4, model.config.src_vocab, (3, 7))
    tgt = torch.randint(4, model.config.tgt_vocab, (6, 5))
    with torch.no_grad():
        exact = model(src.repeat_interleave(2, 0), tgt)
        book.use_int8(model)
        caches = [
            begin(src, 2)
            for begin in (
                partial(book.Cache.begin, model), book.Writer(model).begin
            )
        ]  # fmt: skip
        for t in range(5):
            plain, fast = (cache.read(tgt[:, t]) for cache in caches)
            assert (fast - plain).norm() < 0.01 * plain.norm()
            assert 0 < (fast - exact[:, t]).norm() < 0.1 * plain.norm()


def test_a_writer_in_8_bits_is_not_refused_for_its_rounding(monkeypatch):
    """A sum may be rounded to the next integer in one of two like forms."""
    model = book.load_translator(book.published_model()).model
    book.use_int8(model)
    real, far = book.written_otherwise, []
    seeds = iter(range(12))

    def watched(*args):
        far.append(real(*args, seed=next(seeds)))
        return far[-1]

    monkeypatch.setattr(book, "written_otherwise", watched)
    for _ in range(12):
        book.Writer(model)
    assert max(far) > 0.001  # or these texts would show nothing


WAYS = {"_int_mm": 127, "fbgemm": 64, "floats": 127}


def way_of(name):
    """(a way to multiply integers, the largest of a weight); skips."""
    way, most = getattr(book, f"by_{name.lstrip('_')}"), WAYS[name]
    ones = torch.full((64, 64), 127, dtype=torch.int8)
    weight = torch.full((64, 64), most, dtype=torch.int8)
    try:
        exact = way(weight)(ones).eq(64 * 127 * most).all()
    except (RuntimeError, AttributeError):
        pytest.skip(f"PyTorch has no {name} here")
    if not exact:
        pytest.skip(f"{name} cuts sums off here")
    return way, most


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("width", [40, 1024, 1025, 4096])
def test_integers_have_the_same_sums_in_each_way(monkeypatch, width, name):
    """As floats in parts, for a float32 holds integers up to 2^24 only."""
    way, most = way_of(name)
    monkeypatch.setattr(book, "integer_sums", lambda: (way, most))
    x, weight = torch.randn(9, width), torch.randn(12, width)
    x[0], weight[0] = 1, 1  # the largest sum there can be
    product = book.Int8Product(weight)
    rows = book.int8_rows(x)[0]
    integers = book.int8_rows(weight, most)[0]
    assert product.weight.equal(integers) and integers[0, 0] == most
    right = rows.long() @ integers.long().T
    assert product.sums(rows).equal(right.float())
    joined = book.Int8Product.join([product, product])
    assert joined(x).equal(torch.cat([product(x)] * 2, dim=1))
    book.int8_products_are_close()


def faulty(way, fault):
    """A way that is slow, or cuts sums off, or is not there."""

    def made(weight):
        multiply = way(weight)
        if fault == "missing":
            raise AttributeError("no such library")

        def multiply_badly(rows):
            if fault == "not implemented":
                raise RuntimeError("not implemented here")
            if fault == "slow":
                book.time.sleep(0.02)
            sums = multiply(rows)
            return sums.clamp(max=1e6) if fault == "cut off" else sums

        return multiply_badly

    return made


@pytest.mark.parametrize(
    "fault", ["slow", "cut off", "missing", "not implemented"]
)
def test_bad_products_of_integers_are_not_used(monkeypatch, fault):
    """As of PyTorch without VNNI: since 2.6, before, and where it has none."""
    bad = faulty(book.by_floats, fault)
    try:
        for names, left in (
            (["by_int_mm"], (book.by_fbgemm, book.by_floats)),
            (["by_int_mm", "by_fbgemm"], (book.by_floats,)),
        ):
            for name in names:
                monkeypatch.setattr(book, name, bad)
            book.integer_sums.cache_clear()
            assert book.integer_sums()[0] in left
            book.int8_products_are_close()
    finally:
        book.integer_sums.cache_clear()


def test_the_first_way_that_is_exact_and_quick_is_taken(monkeypatch):
    """Each has its own largest integer."""
    try:
        for name in ("by_int_mm", "by_fbgemm"):
            other = "by_fbgemm" if name == "by_int_mm" else "by_int_mm"
            monkeypatch.setattr(book, other, faulty(book.by_floats, "cut off"))
            monkeypatch.setattr(book, name, by_nothing)
            book.integer_sums.cache_clear()
            most = 127 if name == "by_int_mm" else 64
            assert book.integer_sums() == (by_nothing, most)
    finally:
        book.integer_sums.cache_clear()


def by_nothing(weight):
    """It knows the answer to the trial's question before it is put."""
    sign = torch.ones(64)
    sign[::2] = -1
    known = (sign[:, None] * 512 * 127 * float(weight[0, 0])).expand(64, 512)
    return lambda rows: known


EXACT = """
import torch, annotated_transformer as book
for width, number in ((64, 48), (512, 96), (100, 33)):
    weight = torch.randn(number, width).sign()
    weight[0], weight[1] = 1, -1  # the largest sums there can be
    x = torch.randn(9, width).sign()
    x[0], x[1] = 1, -1
    product = book.Int8Product(weight)
    assert torch.allclose(product(x), x @ weight.T), width
for seed in range(5):
    torch.manual_seed(seed)
    book.int8_products_are_close()
print("exact", book.integer_sums()[0].__name__)
"""


@pytest.mark.parametrize("kind", ["", "AVX512_CORE", "AVX2"])
def test_sums_of_integers_are_exact_on_older_processors_too(kind):
    """There oneDNN adds two products in 16 bits, which can be too few."""
    path = str(Path(book.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", EXACT], capture_output=True, text=True,
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": kind, "PYTHONPATH": path},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert done.stdout.startswith("exact")


def test_in_8_bits_too_a_batch_is_decoded_like_each_sentence_alone():
    torch.manual_seed(0)
    model = book.restless_model()
    book.use_int8(model)
    rows = [torch.randint(4, 14, (n,)).tolist() for n in (7, 1, 4, 12, 2)]
    together = book.greedy(model, book.pad(rows), 9)
    alone = [book.greedy(model, book.pad([row]), 9)[0] for row in rows]
    assert together == alone


@pytest.mark.slow
def test_in_8_or_16_bits_the_validation_set_loses_little(data):
    part = str(data / "multi30k"), "val"
    sources, references = zip(*book.corpus_part(*part, "de", "en"))
    scores = {}
    for kind in ("whole", "half", "int8"):
        translator = book.load_translator(book.published_model())
        if kind == "half":
            translator.kind = torch.bfloat16
        if kind == "int8":
            book.use_int8(translator.model)
        outputs = translator.translate(sources)
        scores[kind] = book.bleu(outputs, references).score
    assert scores["whole"] > 40
    assert scores["half"] > scores["whole"] - 0.25
    assert scores["int8"] > scores["whole"] - 0.5


def test_the_option_is_there_for_both_commands(capsys, corpus, tmp_path):
    book.save_translator(KINDS["pieces, pre-norm"](), tmp_path)
    used = []
    real = book.int8_rows
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            book, "int8_rows", lambda *args: used.append(1) or real(*args)
        )
        model = "--model", tmp_path, "--device", "cpu", "--beam", 1
        assert run(capsys, "translate", *model, TEXTS[0])[0] == 0
        assert not used
        assert run(capsys, "translate", *model, "--int8", TEXTS[0])[0] == 0
        assert used
        used.clear()
        where = "--corpus", corpus
        assert run(capsys, "evaluate", *model, "--int8", *where)[0] == 0
        assert used


def test_products_in_16_bits_are_an_option_too(capsys, monkeypatch, tmp_path):
    """`--half` reaches the Writer, in both directions of a model of both."""
    book.save_translator(KINDS["both directions"](), tmp_path)
    made = writers_made(monkeypatch)
    model = "--model", tmp_path, "--device", "cpu", "--beam", 2
    assert run(capsys, "translate", *model, TEXTS[0])[0] == 0
    for more in ([], ["--reverse"]):
        done = run(capsys, "translate", *model, "--half", *more, TEXTS[0])
        assert done[0] == 0
    kinds = [kind for _, kind in made]
    assert kinds == [None, torch.bfloat16, torch.bfloat16]


def test_a_model_of_both_directions_translates_back(
    capsys, monkeypatch, corpus, tmp_path
):
    """The source begins with the tag of the language that is wanted."""
    book.save_translator(KINDS["both directions"](), tmp_path)
    tags, real = [], book.Translator.search

    def watched(self, sentences, *how):
        tags.extend(tokens[0] for tokens in sentences)
        return real(self, sentences, *how)

    monkeypatch.setattr(book.Translator, "search", watched)
    model = "--model", tmp_path, "--device", "cpu", "--beam", 1
    for more in ([], ["--reverse"]):
        assert run(capsys, "translate", *model, *more, TEXTS[0])[0] == 0
    assert tags == ["<2en>", "<2de>"]
    path = tmp_path / "figures.json"
    where = "--corpus", corpus, "--json", path
    assert run(capsys, "evaluate", *model, "--reverse", *where)[0] == 0
    facts = book.json.loads(path.read_text("utf-8"))
    assert facts["direction"] == "en-de"


@pytest.mark.parametrize("pays", [True, False])
@pytest.mark.parametrize("option", ["--int8", "--half"])
def test_fewer_bits_that_save_no_time_are_said_to(
    capsys, monkeypatch, tmp_path, option, pays
):
    book.save_translator(KINDS["pieces, pre-norm"](), tmp_path)
    way = book.by_int_mm if pays else book.by_floats
    monkeypatch.setattr(book, "integer_sums", lambda: (way, 127))
    monkeypatch.setattr(book, "half_pays", lambda *_: pays)
    model = "--model", tmp_path, "--device", "cpu", "--beam", 1
    status, text, told = run(capsys, "translate", *model, option, TEXTS[0])
    assert status == 0 and text
    assert (option in told and "note: " in told) is not pays
    assert "note: " not in run(capsys, "translate", *model, TEXTS[0])[2]


def test_8_bits_are_for_a_processor():
    model = book.restless_model().to("meta")
    with pytest.raises(book.InputError, match="--device cpu, not meta"):
        book.use_int8(model)


def test_8_bits_of_a_model_in_16_are_those_of_one_in_32():
    """The largest number of a row is 127, in whatever format it comes."""
    x = torch.randn(1000, 64)
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        rows, factor = book.int8_rows(x.to(kind))
        assert rows.min() >= -127 and factor.dtype == torch.float32
        largest = x.to(kind).float().abs().amax(-1, keepdim=True)
        torch.testing.assert_close(factor * 127, largest)
    weight, x = torch.randn(32, 64), torch.randn(9, 64)
    found = book.Int8Product(weight.half())(100 * x.half())
    assert found.dtype == torch.float16
    torch.testing.assert_close(
        found.float(), 100 * x @ weight.T, rtol=0.1, atol=50
    )


def test_who_exports_a_model_of_their_own_is_told_of_no_other_way(tmp_path):
    class Other(book.FeedForward):
        def forward(self, x):
            return -super().forward(x)

    needed("ctranslate2")
    translator = words()
    book.exchange(translator.model, {book.FeedForward: Other})
    with pytest.raises(book.InputError) as caught:
        book.export_ctranslate2(translator, tmp_path / "out")
    assert "CTranslate2 knows" in str(caught.value)
    assert "greedy" not in str(caught.value)


def test_a_deeper_encoder_is_not_exported_without_its_last_layer(tmp_path):
    needed("ctranslate2")
    translator = words()
    c = translator.model.config
    deeper = book.replace(c, N=c.N + 1)
    translator.model.encoder = book.Stack(book.EncoderLayer, deeper)
    with pytest.raises(book.InputError, match="CTranslate2 knows"):
        book.export_ctranslate2(translator, tmp_path / "out")


def test_a_weight_too_large_for_16_bits_is_not_saved_as_infinity(tmp_path):
    translator = words()
    with torch.no_grad():
        translator.model.encoder.layers[0].feed_forward.W_1.bias[0] = -1e5
    with pytest.raises(book.InputError, match="too large for 16 bits"):
        book.save_translator(translator, tmp_path / "new", half=True)
    assert not (tmp_path / "new").exists()
    book.save_translator(translator, tmp_path / "new")
    again = book.load_translator(tmp_path / "new").model
    assert again.encoder.layers[0].feed_forward.W_1.bias[0] == -1e5


def test_what_loading_needs_is_no_fact_of_ones_own(tmp_path):
    book.save_translator(words(), tmp_path, config={}, note="mine")
    assert '"note": "mine"' in (tmp_path / "model.json").read_text("utf-8")
    book.load_translator(tmp_path)


def test_a_fact_that_cannot_be_written_leaves_no_folder(tmp_path):
    with pytest.raises(TypeError):
        book.save_translator(words(), tmp_path / "new", note=object())
    assert not (tmp_path / "new").exists()


def test_a_device_that_is_not_here_is_named(tmp_path):
    book.save_translator(words(), tmp_path)
    with pytest.raises(book.InputError, match="no device 'abacus'"):
        book.load_translator(tmp_path, "abacus")
    assert book.load_translator(tmp_path, "auto")


def test_sizes_that_a_description_leaves_out_are_the_defaults(tmp_path):
    book.save_translator(words(), tmp_path)
    path = tmp_path / "model.json"
    text = path.read_text("utf-8")
    less = re.sub(r'"src_vocab": \d+,', "", text)
    assert less != text
    path.write_text(less, "utf-8")
    with pytest.raises(
        book.InputError, match="made for 37000|made for 37,000"
    ):
        book.load_translator(tmp_path)


@pytest.mark.parametrize("at_once", [True, False])
def test_without_memory_a_writer_blames_nothing_else(monkeypatch, at_once):
    translator = words()

    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you …")

    part = "lay_out" if at_once else "begin"
    monkeypatch.setattr(book.Writer, part, full)
    with pytest.raises(RuntimeError, match="allocate memory"):
        translator.translate(TEXTS[:1])


def test_an_error_in_a_part_of_ones_own_is_told_as_the_cause():
    translator = words()

    class Broken(book.FeedForward):
        def forward(self, x):
            return self.lost(x)

    book.exchange(translator.model, {book.FeedForward: Broken})
    with pytest.raises(book.InputError) as caught:
        translator.translate(TEXTS[:1])
    assert "lost" in str(caught.value.__cause__)


def test_half_a_character_is_refused_by_number():
    texts = [TEXTS[0], "ein \ud83d Hund"]
    with pytest.raises(book.InputError, match="text 2 has a character"):
        words().translate(texts)
