"""Programs of others, given our weights, compute and write what ours does."""

import importlib
import json
import platform
import sys

import pytest
import torch
from helpers import needed

import annotated_transformer as book
from annotated_transformer import BOS, EOS, PAD, UNK

sys.path.insert(0, str(book.Path(book.__file__).parent / "benchmarks"))

import decoding_cache  # noqa: E402
import decoding_peers  # noqa: E402
import export  # noqa: E402
import gpu  # noqa: E402
import machine  # noqa: E402
import peers  # noqa: E402
import run  # noqa: E402
import training  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def sources(rows, words, V=14):
    """(rows, words) random source ids with EOS at the end."""
    src = torch.randint(4, V, (rows, words))
    src[:, -1] = EOS
    return src


def padded():
    """Sources and targets of several lengths."""
    src = book.pad([row.tolist() for n in (3, 9, 5) for row in sources(1, n)])
    tgt = book.pad([[BOS, 7, 5], [BOS, 4, 9, 13, 6, 8], [BOS]])
    return src, tgt


def lively(seed=0, **changes):
    torch.manual_seed(seed)
    model = book.restless_model(norm_first=False, **changes)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms and biases, which start at 1 and 0
                weight.add_(0.2 * torch.randn_like(weight))
    return model


# ------------------------------------------------------------------ logits


@pytest.mark.parametrize("shared", [True, False])
def test_marians_logits_are_ours(shared):
    needed("transformers")
    model = lively(shared=shared)
    twin, (src, tgt) = peers.marian(model), padded()
    with torch.no_grad():
        ours = model(src, tgt)
        theirs = twin(
            input_ids=src,
            attention_mask=(src != PAD).long(),
            decoder_input_ids=tgt,
            decoder_attention_mask=(tgt != PAD).long(),
        ).logits
    real, words = tgt != PAD, [EOS, *range(4, 14)]
    torch.testing.assert_close(
        theirs[real][:, words], ours[real][:, words], rtol=1e-4, atol=1e-4
    )
    assert (theirs[real][:, [PAD, BOS, UNK]] < -1000).all()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_torchs_logits_and_loss_are_ours(norm_first, shared):
    torch.manual_seed(0)
    model = book.tiny_model(norm_first=norm_first, shared=shared).eval()
    twin = peers.torch_transformer(model.config)
    twin = peers.fill_torch(twin, model).eval()
    src, tgt = padded()
    real = tgt != PAD
    torch.testing.assert_close(
        twin(src, tgt)[real], model(src, tgt)[real], rtol=1e-4, atol=1e-4
    )
    batch = book.Batch(src, tgt)
    loss, labels = twin.loss(batch), batch.labels
    logits = model(batch.src, batch.read)[labels != PAD]
    labels = labels[labels != PAD]
    wanted = book.smoothed_loss(logits, labels) / len(labels)
    torch.testing.assert_close(loss, wanted, rtol=1e-4, atol=1e-4)
    loss.backward()
    assert twin.tgt_embedding.weight.grad.abs().sum() > 0


def test_torchs_model_drops_where_the_paper_does():
    """Embeddings and each sub-layer's output: 2 + N (2 + 3) places."""
    config = book.tiny_model(dropout=0.25).config
    twin = peers.torch_transformer(config)
    drops = [m for m in twin.modules() if isinstance(m, torch.nn.Dropout)]
    assert {m.p for m in drops} == {0.25}
    assert len(drops) == 1 + config.N * 5  # one serves both embeddings
    heads = torch.nn.MultiheadAttention
    assert all(m.dropout == 0 for m in twin.modules() if isinstance(m, heads))


# ----------------------------------------------------------------- outputs


@pytest.mark.parametrize("peer", ["transformers", "ctranslate2"])
def test_peers_write_greedily_what_ours_writes(peer):
    needed(peer)
    outputs = []
    for seed in range(4):
        model, src = lively(seed), sources(12, 6)
        ours = book.greedy(model, src, 9)
        if peer == "transformers":
            texts = peers.marian_writes(peers.marian(model), src, extra=9)
        else:
            texts = peers.ct2_writes(peers.ct2(model, None), src, extra=9)
        assert texts == ours
        outputs += ours
    assert len(set(map(len, outputs))) > 2
    assert len(set(map(tuple, outputs))) > 10


@pytest.mark.parametrize("width, alpha", [(1, 0), (2, 0.6), (4, 0), (5, 1)])
def test_where_all_end_at_once_beams_are_equal(width, alpha):
    """Else the rules differ: our beam gets narrower, theirs stay full."""
    needed("transformers")
    needed("ctranslate2")
    torch.manual_seed(width)
    sizes = dict(N=2, d_model=32, d_ff=64, h=4)
    model = peers.punctual_model(book.Config(60, 60, **sizes), 11)
    rows = [row.tolist() for n in (2, 9, 5, 7) for row in sources(2, n, 60)]
    found = peers.faithful(model, book.pad(rows), width, alpha)
    assert set(found) == {"ours", "marian", "ct2"}
    texts = [outputs for outputs, _ in found.values()]
    assert texts[0] == texts[1] == texts[2]
    assert all(len(text) == 11 for text in texts[0])
    assert len(set(map(tuple, texts[0]))) > 4
    assert {wrong for _, wrong in found.values()} == {0}


def test_a_peer_with_other_weights_is_found_out():
    needed("transformers")
    model = lively()
    twin, src = peers.marian(model), sources(12, 6)
    ours = book.greedy(model, src, extra=9)
    assert peers.marian_writes(twin, src, extra=9) == ours
    with torch.no_grad():
        twin.model.decoder.layers[1].fc2.weight.neg_()
    assert peers.marian_writes(twin, src, extra=9) != ours


def test_marian_refuses_pre_norm():
    needed("transformers")
    with pytest.raises(book.InputError, match="pre-norm"):
        peers.marian(book.tiny_model(norm_first=True))


# ------------------------------------------------------- the benchmarks run


def test_the_quick_benchmark_times_every_program(tmp_path, capsys):
    needed("transformers")
    needed("ctranslate2")
    out = tmp_path / "rows.json"
    more = "--quick", "--only", "base", "--json", str(out)
    rows = decoding_peers.main(more)
    facts = json.loads(out.read_text(encoding="utf-8"))
    assert facts["rows"] == rows and "torch" in facts["machine"]["versions"]
    whole = {"ours", "Marian", "CTranslate2"}
    for width in (1, 5):
        named = {row["program"]: row for row in rows if row["width"] == width}
        assert whole < named.keys() and "ours, int8" in named
        assert ("ours, bf16" in named) == decoding_peers.half_is_measured()
        for name in whole:
            assert named[name]["differ_from_ours"] == 0
            assert named[name]["tokens"] == 8 * 16
    assert capsys.readouterr().out.count("tokens/s") == len(rows)


def test_the_quick_benchmark_of_the_cache_writes_the_same_both_ways(tmp_path):
    """What it measures is the book's two decoders, and they agree there."""
    out = tmp_path / "cache.json"
    rows = decoding_cache.main(["--quick", "--json", str(out)])
    assert [row["words"] for row in rows] == [3, 6]
    assert all(row["plain"] > 0 and row["kept"] > 0 for row in rows)
    written = json.loads(out.read_text("utf-8"))
    assert written["rows"] == rows and "commit" in written["machine"]


def test_the_quick_benchmark_of_training_runs_every_form(tmp_path, capsys):
    needed("transformers")
    out = tmp_path / "rows.json"
    parts = [f"--only={part}" for part in ("peer", "kept", "forms", "limit")]
    half = decoding_peers.half_is_measured()
    rows = training.main(["--quick", *parts, "--json", str(out)])
    facts = json.loads(out.read_text(encoding="utf-8"))
    assert facts["rows"] == rows and facts["machine"]["threads"] >= 1
    forms = [row["form"] for row in rows if row["setting"] == "forms"]
    assert [form for form in book.FORMS if form in forms] == forms
    assert {*book.FORMS} - {*forms} <= KINDS
    ours = [row for row in rows if "over_peer" in row]
    assert all(row["over_peer"][0] > 0 for row in ours)
    settings = ["tiny", "base"]
    if platform.libc_ver()[0] == "glibc":
        settings += ["tiny, kept", "base, kept"]
    assert [row["setting"] for row in ours] == [
        setting for setting in settings for _ in range(4 if half else 2)
    ]
    assert all(0 < row["share"][0] for row in rows if "share" in row)
    found = {"training": facts, "decoding_peers": {"rows": []}}
    run.table(found)
    lines = capsys.readouterr().out.splitlines()
    # of decoding, without glibc, and in 16 bits
    left_out = 12 + 4 - len(settings) + 4 * (not half)
    assert sum("not run" in line for line in lines) == left_out
    assert sum("nn.Transformer" in line for line in lines) == 6
    assert sum("memory kept by both" in line for line in lines) == 2


@pytest.mark.slow
def test_two_processes_are_timed_on_the_corpus_of_the_other_forms(corpus):
    quick = ["--quick", "--only", "forms", "--processes", "--rounds", "1"]
    [*_, row] = training.main([*quick, "--corpus", str(corpus)])
    assert row["form"] == "two processes"
    assert row["tokens_per_second"][0] > 0


@pytest.mark.parametrize("slow", [3.9, 4.1])
def test_16_bits_are_left_out_where_they_would_take_hours(
    slow, monkeypatch, capsys
):
    seconds = {"32 bits": 1.0, "oneDNN": 1.0, "16 bits": slow}
    monkeypatch.setattr(book, "product_seconds", lambda *_: seconds)
    monkeypatch.setattr(training, "our_update", lambda *_: lambda: 1)
    monkeypatch.setattr(training, "peers_update", lambda *_: lambda: 1)
    rows = training.main(["--quick", "--only", "peer"])
    measured = ["16" in row["form"] for row in rows]
    assert measured == ([False, True] * 4 if slow < 4 else [False] * 4)
    parts = {"training": {"rows": rows}, "decoding_peers": {"rows": []}}
    assert all(
        bool(found) == (slow < 4 or "16" not in what)
        for what, found, _ in run.aims(parts)
        if "training" in what and "kept" not in what
    )
    assert ("16 bits: left out" in capsys.readouterr().out) == (slow > 4)
    asked = []
    monkeypatch.setattr(
        decoding_peers, "programs", lambda *how: asked.append(how[2]) or {}
    )
    decoding_peers.main(["--quick", "--only", "base"])
    assert asked == [slow < 4] * 2  # greedily, and with a beam


KINDS = {"products by oneDNN", "16-bit products"}


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("onednn", [True, False])
def test_the_forms_multiply_in_another_way_only_where_that_pays(
    half, onednn, monkeypatch, capsys
):
    monkeypatch.setattr(book, "half_pays", lambda *_: half)
    monkeypatch.setattr(book, "onednn_pays", lambda device: onednn)
    rows = training.main(["--quick", "--only", "forms", "--processes"])
    # Without a corpus: tokens of two texts make no ratio.
    assert "two processes: left out" in capsys.readouterr().out
    forms = [row["form"] for row in rows]
    assert "two processes" not in forms
    assert [form for form in book.FORMS if form not in KINDS] == [
        form for form in forms if form not in KINDS
    ]
    assert ("16-bit products" in forms) is half
    assert ("products by oneDNN" in forms) is onednn


def test_the_rate_of_the_machine_is_that_of_the_faster_library(monkeypatch):
    for quick in (torch.nn.functional.linear, book.onednn_product):

        def seconds(work, tries, quick=quick):
            return 2.0 if work.func is quick else 4.0

        monkeypatch.setattr(book, "best_seconds", seconds)
        assert training.machines_rate(4) == 2 * 4**3 / 2.0


def test_another_machine_has_files_of_its_own(capsys):
    files = [run.file_of("decoding_peers", name) for name in (None, "xeon")]
    assert files == [
        "benchmarks-decoding-peers.json",
        "benchmarks-decoding-peers-xeon.json",
    ]
    with pytest.raises(SystemExit):
        run.main(["--name", "../xeon"])
    assert "--name" in capsys.readouterr().err


def test_a_benchmark_says_at_once_what_it_cannot_use(tmp_path, capsys):
    for wrong, told in (
        (["--corpus", str(tmp_path)], "train.en"),
        (["--corpus", "toy", "--model", str(tmp_path)], "model.json"),
        (["--model", "results/model-en-de"], "--corpus"),
        (["--pairs", "many"], "many"),
    ):
        with pytest.raises(SystemExit):
            run.main(wrong)
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_the_price_of_a_corpus_is_measured(tmp_path):
    """Twice: the second start finds it encoded."""
    data = importlib.import_module("data")  # readers have a folder data
    data.synthesize(tmp_path, 2000)
    first, second = (data.fresh(tmp_path, 500) for _ in range(2))
    assert first["pairs"] == second["pairs"] == 2000
    assert first["tokens"] == second["tokens"] > 2 * 2000
    assert first["seconds"]["encode"] > second["seconds"]["encode"]
    assert first["seconds"]["learn"] > second["seconds"]["learn"]
    assert 50 < first["peak_megabytes"] < 4000
    assert first["megabytes_on_disk"] == (
        (tmp_path / "pairs.pt").stat().st_size / 1e6
    )


def test_a_ratio_of_speeds_is_that_of_the_rounds():
    """Not that of two medians, which may come from different rounds."""
    row = {"setting": "base", "width": 1, "program": "Marian"}
    times = {
        "Marian": [1.0, 2.0, 6.0],
        "ours, bf16": [1.0, 1.0, 2.0],
        "ours, int8": [1.0, 0.5, 2.0],
    }
    rows = [
        row | {"program": name, "seconds": found, "ours_over_it": [1, 1, 1]}
        for name, found in times.items()
    ]
    reached = {
        what: found
        for what, found, _ in run.aims(
            {"training": {"rows": []}, "decoding_peers": {"rows": rows}}
        )
    }
    what = "base, greedy, ours in {} bits over Marian in 32"
    assert reached[what.format(16)] == [2, 1, 3]
    assert reached[what.format(8)] == [3, 1, 4]


def test_a_gpu_is_measured_by_the_same_command(tmp_path, monkeypatch, capsys):
    """Here its quick form, on the processor, with a compiler that copies."""
    monkeypatch.setattr(torch, "compile", lambda function, **how: function)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = book.Config(100, 100, N=1, d_model=32, d_ff=64, h=2)
    file = tmp_path / "gpu.json"
    gpu.main(["--quick", "--json", str(file), "--commit", "abc1234"])
    found = json.loads(file.read_text("utf-8"))
    assert found["machine"]["commit"] == "abc1234"
    forms = [row["form"] for row in found["rows"]]
    ways = "", ", compiled", ", recorded"
    assert forms == [who + way for who in ("peer", "ours") for way in ways]
    for row in found["rows"]:
        rate = row["operations_per_second"][0]
        tokens, share = row["tokens_per_second"][0], row["share"][0]
        per_token = gpu.operations(config, 8) / 8
        assert share == pytest.approx(tokens * per_token / rate, rel=0.01)
    parts = dict.fromkeys(("training", "decoding_peers"), {"rows": []})
    reached = {what: aim for what, _, aim in run.aims(parts | {"gpu": found})}
    assert reached["GPU, base, compiled, of the product rate"] == 0.35
    assert reached["GPU, base, recorded, over nn.Transformer likewise"] == 1.3
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no CUDA device" in capsys.readouterr().err


def test_the_machine_is_named_even_without_git_or_a_name(
    tmp_path, monkeypatch
):
    """No git, as in a folder that was unpacked; no name, as on ARM."""
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n", "utf-8")
    assert machine.processor(info) and machine.instructions(info) == []
    info.write_text("model name\t: A Fast One\n", "utf-8")
    assert machine.processor(info) == "A Fast One"
    info.write_text("flags\t: fpu amx_bf16 avx2_of_mine avx512f\n", "utf-8")
    assert machine.instructions(info) == ["avx512f", "amx_bf16"]
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = machine.machine({"corpus": f"{tmp_path}/captions", "rounds": 5})
    assert facts["commit"] == "" and facts["cpu"]
    assert facts["options"] == {"corpus": "captions", "rounds": 5}


def test_the_comparison_of_exports_counts_what_differs(
    corpus, tmp_path, capsys
):
    needed("ctranslate2")
    pairs = book.read_pairs(corpus, "train", "de", "en")
    torch.manual_seed(0)
    sizes = dict(N=1, d_model=16, d_ff=16, h=2)
    translator = book.untrained_translator(pairs, ("de", "en"), sizes)
    book.save_translator(translator, tmp_path)
    rows = export.compare(tmp_path, str(corpus), "test")
    assert [row["sentences"] for row in rows] == [4] * 9
    assert rows[0]["differ"] == rows[4]["differ"] == 0
    for row in rows:
        kinds = "ties", "ours_likelier", "theirs_likelier"
        assert row["differ"] == sum(row[kind] for kind in kinds) <= 4
    assert len(capsys.readouterr().out.splitlines()) == 9
