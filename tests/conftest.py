"""What every test may use: the same seed, and the real data if it is here."""

import os
import sys
from pathlib import Path

import pytest

# jsonschema, which nbformat asks, would learn the grammar of web addresses
# from it: that takes a second in each process, and no notebook here has such.
sys.modules["rfc3987_syntax"] = None
if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has one of the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

import annotated_transformer as book  # noqa: E402


@pytest.fixture(autouse=True)
def seed():
    """Start each test from one seed, so that its place in the run is free."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk():
    """Each file of a run is flushed to the disk; no test pulls the plug."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session")
def data():
    """Return the folder of real data that ANNOTATED_TRANSFORMER_DATA names."""
    folder = os.environ.get("ANNOTATED_TRANSFORMER_DATA")
    if not folder:
        pytest.skip("real data: set ANNOTATED_TRANSFORMER_DATA to its folder")
    path = Path(folder)
    assert path.is_dir(), f"ANNOTATED_TRANSFORMER_DATA: no folder {path}"
    return path


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: quick beside other work, the same in each process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A folder of a few hundred short pairs: two batches an epoch."""
    folder = tmp_path_factory.mktemp("corpus")
    pairs = book.toy_corpus()
    for part, size in {"train": 700, "val": 3, "test": 4}.items():
        for language in ("de", "en"):
            lines = [getattr(p, language) for p in pairs[part][:size]]
            text = "".join(f"{line}\n" for line in lines)
            path = folder / f"{part}.{language}"
            path.write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The page that `make html` makes of the stored notebook."""
    from tools import page

    path = tmp_path_factory.mktemp("page") / "book.html"
    try:
        page.build(page.NOTEBOOK, path)
    except SystemExit as error:
        pytest.fail(f"{error}")
    return path


@pytest.fixture(scope="session")
def toy_translator():
    """The book's own, cached there, but untrained: its words are random."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("steps", "warmup"):
            patch.setitem(book.TOY_RECIPE, name, 1)
        translator, _ = book.toy_translator()
    torch.manual_seed(0)
    book.shake(translator.model, 0.05)
    return translator


# What takes longest begins first, so that nothing runs alone at the end.
LONGEST = ["test_notebook", "test_lasting", "test_browser", "test_distributed",
           "test_commands", "test_several_machines", "test_attention",
           "test_results", "test_peers", "test_speed", "test_shapes",
           "test_checks", "test_scale", "test_claims"]  # fmt: skip


def pytest_collection_modifyitems(items):
    """Let the longest files come first (a worker takes a whole file)."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="module")
def few(corpus, tmp_path_factory):
    """A corpus of 50 pairs: a run of twelve updates reads it twice."""
    folder = tmp_path_factory.mktemp("few")
    for part, size in {"train": 50, "val": 3}.items():
        for language in ("de", "en"):
            text = (corpus / f"{part}.{language}").read_text("utf-8")
            lines = text.splitlines(keepends=True)[:size]
            path = folder / f"{part}.{language}"
            path.write_text("".join(lines), encoding="utf-8")
    return folder
