"""The project around the book: its notebook, requirements and files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import notebook

ROOT = Path(__file__).resolve().parent.parent
BINARY = {".png", ".pt", ".model"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(name):
    """Return the requirements that a file lists, comments left out."""
    lines = [line.partition("#")[0].strip() for line in read(name).split("\n")]
    return [Requirement(line) for line in lines if line]


def tracked():
    """Return the files that git tracks."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("the files' list: needs git and a clone")
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    )
    names = listing.stdout.decode("utf-8").split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def test_the_notebook_has_the_cells_of_the_source():
    assert notebook.differences() == ""


def test_the_notebook_shows_outputs():
    cells = notebook.read_notebook().cells
    assert any(cell.get("outputs") for cell in cells)


def test_the_notebook_holds_no_error_and_no_trace_of_one_run():
    book = notebook.read_notebook()
    assert book.metadata == notebook.METADATA
    for cell in book.cells:
        assert set(cell.metadata) <= {"tags", "lines_to_next_cell"}
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr"


def test_the_notebook_is_small():
    assert notebook.NOTEBOOK.stat().st_size <= notebook.MAX_BYTES


def test_a_failing_cell_is_told_by_its_line_in_the_source(
    tmp_path, monkeypatch
):
    source = tmp_path / "book.py"
    source.write_text("# %%\nx = 0\n\n# %%\ny = 1\n1 / x\n", encoding="utf-8")
    monkeypatch.setattr(notebook, "SOURCE", source)
    with pytest.raises(SystemExit, match=r"book\.py:6\n(?s:.)*book\.py:5 "):
        notebook.execute(tmp_path / "book.ipynb")
    assert not (tmp_path / "book.ipynb").exists()


def test_requirements_name_what_the_book_uses():
    used = "torch jupytext jupyter altair pandas torchtext spacy gputil"
    listed = requirements("requirements.txt")
    assert {canonicalize_name(r.name) for r in listed} >= set(used.split())


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_constraints_fix_each_requirement_within_its_range(python):
    def applying(name):
        return {
            canonicalize_name(r.name): r
            for r in requirements(name)
            if not r.marker or r.marker.evaluate({"python_version": python})
        }

    fixed = applying("constraints.txt")
    for name, wanted in applying("requirements.txt").items():
        (pin,) = fixed[name].specifier
        assert pin.operator == "=="
        assert wanted.specifier.contains(pin.version), name


def test_make_alone_lists_every_target():
    if not shutil.which("make"):
        pytest.skip("the targets' list: needs make")
    shown = subprocess.run(
        ["make", "--no-print-directory"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    targets = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.M)[1].split()
    assert re.findall(r"^  make ([a-z-]+) ", shown, re.M) == targets


def test_text_files_are_utf8_with_plain_line_ends():
    for path in tracked():
        if path.suffix not in BINARY:
            assert "\r" not in path.read_bytes().decode("utf-8"), path.name


def test_no_file_names_a_folder_of_one_machine_or_a_registry():
    # Spelt in parts, so that this file passes its own test.
    folders = r"(?<![\w.~-])/(?:ro" + r"ot|tm" + r"p|wo" + r"rk|ho" + r"me)/"
    registry = r"py" + r"pi\.org|index-" + r"url|find-" + r"links"
    for path in tracked():
        if path.suffix not in BINARY:
            text = path.read_text(encoding="utf-8")
            found = re.search(f"{folders}|{registry}", text)
            assert not found, f"{path.name}: {found[0]}"
