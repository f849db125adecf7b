"""The project around the book: its notebook, requirements and files."""

import ast
import base64
import io
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from nbconvert import HTMLExporter, ScriptExporter
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from PIL import Image

import annotated_transformer as book
from tools import notebook

ROOT = Path(__file__).resolve().parent.parent
BINARY = {".png", ".pt", ".model", ".woff2"}


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
    nb = notebook.read_notebook()
    assert nb.metadata == notebook.METADATA
    for cell in nb.cells:
        own = {"tags", "lines_to_next_cell"}
        own |= {"jupyter", "cellView", "_kg_hide-input"}
        assert set(cell.metadata) <= own
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr"


def outputs_of(cell):
    """The text of a cell's outputs; pictures and charts left out."""
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield output.get("data", {}).get("text/plain", "")


TIMED = {"what_the_machine_can_do", "one_technique_after_another",
         "ways_of_writing", "roofline_of_this_machine"}  # fmt: skip


def test_outputs_tell_no_time_path_or_counter():
    """So a new run gives the same notebook, but for what measures speed."""
    timed = set()
    for cell in notebook.read_notebook().cells:
        assert cell.get("execution_count") is None
        names = {name for name in TIMED if f"def {name}(" in cell.source}
        timed |= names
        for text in outputs_of(cell):
            text = re.sub(r"(0\.4|1\.0) seconds", "", text)  # the paper's
            word = r"\d ?(s|ms|sec\w*|min\w*)\b"
            assert names or not re.search(word, text), text
            assert not re.search(r"(^|\s)(/|[A-Z]:\\)\w|0x[0-9a-f]{6}", text)
    assert timed == TIMED


def test_the_readme_tells_what_the_stored_notebook_shows():
    """Of the generated corpus, which the notebook alone measures."""
    words = " ".join(read("README.md").split())
    [bleu, right, head, place] = re.search(
        r"corpus\*\*: BLEU ([\d.]+) .*? (\d+) of them exactly right .*?"
        r"for (\d+) % of the words; .*? right for (\d+) %",
        words,
    ).groups()
    cells = notebook.read_notebook().cells
    shown = "\n".join(text for cell in cells for text in outputs_of(cell))
    assert f"BLEU {bleu}\n{right} of 1000 exactly right" in shown
    [best] = re.findall(r"best head, trained +([\d.]+)%", shown)
    [same] = re.findall(r"same place in the sentence +([\d.]+)%", shown)
    assert [head, place] == [f"{float(x):.0f}" for x in (best, same)]


def test_the_notebook_has_its_pictures_inside():
    """Each as PNG in its own cell, with its text; no path that can break."""
    shown, source = [], (ROOT / "annotated_transformer.py").read_text("utf-8")
    for cell in notebook.read_notebook().cells:
        if cell.cell_type != "markdown":
            continue
        assert "](images" not in cell.source and "](../" not in cell.source
        for text, name in re.findall(r"!\[(.+?)\]\[([\w-]+)\]", cell.source):
            [data] = re.findall(
                rf"(?m)^\[{name}\]: data:image/png;base64,(\S+)$", cell.source
            )
            assert base64.b64decode(data)[:4] == b"\x89PNG"
            assert len(text) > 60
            shown.append(name)
    assert shown == re.findall(r"\(images/([\w-]+)\.svg\)", source)
    assert len(set(shown)) == len(shown) == 5


def test_without_scripts_each_chart_is_a_picture():
    """As nbviewer shows it, which uses nbconvert."""
    nb = notebook.read_notebook()
    charts = sum(
        any(kind.startswith(notebook.CHART) for kind in output.data)
        for cell in nb.cells
        for output in cell.get("outputs", [])
        if "data" in output
    )
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.source = ""  # to colour all the code takes long
    text, _ = HTMLExporter(template_name="basic").from_notebook_node(nb)
    shown = BeautifulSoup(text, "html.parser")
    for script in shown.find_all("script"):
        script.decompose()
    images = shown.find_all("img")
    assert all(len(image.get("alt", "")) > 40 for image in images)
    sources = [image["src"] for image in images]
    assert charts > 15 and len(sources) == charts + 5
    for source in sources:
        data = base64.b64decode(source.removeprefix("data:image/png;base64,"))
        assert data[:4] == b"\x89PNG"


def test_pictures_go_in_and_come_out_again():
    text = "Before.\n\n![What one sees.](images/heads.svg)\n\nAfter."
    inside = notebook.embedded(text, {})
    assert "![What one sees.][heads]" in inside and len(inside) > 5000
    assert notebook.with_paths(inside) == text


def test_the_corners_of_a_picture_are_white():
    """Its card is rounded, and what is outside of it has no colour."""
    pictures = notebook.stored_pictures().values()
    for data in pictures:
        image = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        assert image.getpixel((0, 0)) == (255, 255, 255)
    assert len(pictures) > 4


def test_titles_become_links_and_come_out_again():
    """Of sections that are there once; by the names that JupyterLab gives."""
    book = notebook.read_source()
    found, names = [], notebook.anchors(book)
    for cell in book.cells:
        if cell.cell_type == "markdown":
            found += re.findall(
                r"\[\*([^*]+)\*\]\((#\S+?)\)(?!-)", cell.source
            )
    assert len(found) > 150 and "Exercises" not in names
    for title, name in found:
        assert name == f"#{names[' '.join(title.split())]}"
    assert names["The ledger"] == "The-ledger"
    text = "See *The\n  ledger*, *no title*, a * b * c, and **The ledger**."
    inside = notebook.linked(text, names)
    assert inside.startswith("See [*The\n  ledger*](#The-ledger), *no title*")
    assert inside.count("](#") == 1
    assert notebook.with_paths(inside) == text


def test_a_picture_lasts_as_long_as_its_drawing(monkeypatch, tmp_path):
    """A machine with other fonts would paint it otherwise."""
    drawn = notebook.stored_pictures()
    drawing = Path(shutil.copy(notebook.IMAGES / "heads.svg", tmp_path))
    monkeypatch.setattr(notebook, "IMAGES", tmp_path)
    monkeypatch.setattr(
        notebook.vl_convert, "svg_to_png", lambda *_: pytest.fail("painted")
    )
    text = "![What one sees.](images/heads.svg)"
    assert notebook.with_paths(notebook.embedded(text, drawn)) == text
    changed = drawing.read_text(encoding="utf-8").replace("13", "14")
    drawing.write_text(changed, encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="painted"):
        notebook.embedded(text, drawn)


def test_a_missing_picture_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(notebook, "IMAGES", tmp_path)
    with pytest.raises(SystemExit, match=r"heads\.svg.*drawings"):
        notebook.embedded("![x](images/heads.svg)", {})


def test_what_is_optional_is_folded_and_nothing_else():
    for cell in notebook.read_notebook().cells:
        folded = cell.metadata.get("jupyter", {}).get("source_hidden", False)
        assert folded == bool(
            notebook.FOLDED & {*cell.metadata.get("tags", [])}
        )
        assert folded == (cell.metadata.get("cellView") == "form")  # Colab
        assert folded == cell.metadata.get("_kg_hide-input", False)  # Kaggle


def test_a_script_made_of_the_notebook_is_one():
    """By nbconvert code alone; by Colab prose, too, as strings."""
    nb = notebook.read_notebook()
    code, resources = ScriptExporter().from_notebook_node(nb)
    assert resources["output_extension"] == ".py"
    compile(code, "script", "exec")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of \m in a formula
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                ast.parse(f'"""{cell.source}"""')


@pytest.mark.parametrize(
    "there, missing",
    [
        ({}, book.PACKAGES.split()),
        ({"altair": "6.0", "torchtext": "0.18.0"}, None),
        ({"altair": "5.5.0", "torchtext": "0.6.0"}, []),
        (
            {
                "altair": "5.5.0",
                "torchtext": "0.6.0",
                "vl-convert-python": "1.6.0",
            },
            ["vl-convert-python>=1.7"],
        ),
    ],
)
def test_colab_gets_what_is_missing_and_keeps_its_torch(
    monkeypatch, there, missing
):
    """Only packages that are absent or do not fit are asked for."""
    asked = []

    def version(name):
        if not there:
            raise book.metadata.PackageNotFoundError(name)
        return there.get(name, "9.0")

    monkeypatch.setattr(book.metadata, "version", version)
    monkeypatch.setattr(
        book.subprocess, "run", lambda command, check: asked.extend(command)
    )
    book.install_missing()
    if missing is None:
        missing = ["altair>=5.5,<6", "torchtext==0.6.0"]
    assert [a for a in asked if a in book.PACKAGES.split()] == missing
    assert bool(asked) == bool(missing)
    assert "torch" not in asked and "--upgrade" not in asked


def test_what_colab_gets_is_what_the_requirements_ask_for():
    wanted = {
        canonicalize_name(r.name) for r in requirements("requirements.txt")
    }
    for package in book.PACKAGES.split():
        assert canonicalize_name(Requirement(package).name) in wanted


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


def defined(body):
    """The names that functions, classes and imports of a body define."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                yield (alias.asname or alias.name).partition(".")[0]
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                for part in ast.walk(target):
                    if isinstance(part, ast.Name):
                        yield part.id


def test_no_name_of_the_book_is_defined_twice():
    """In one file that long, a second function would replace the first."""
    body = ast.parse(read("annotated_transformer.py")).body
    names = list(defined(body))
    for node in body:
        if isinstance(node, ast.ClassDef):
            methods = (part for part in node.body if hasattr(part, "name"))
            names += [f"{node.name}.{method.name}" for method in methods]
    assert [name for name in names if names.count(name) > 1] == []


def test_requirements_name_what_the_book_uses():
    tree = ast.parse(read("annotated_transformer.py"))
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import)]
    names = {alias.name for node in imports for alias in node.names}
    names |= {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    used = {name.split(".")[0] for name in names} - sys.stdlib_module_names
    # Jupyter brings IPython, Altair packaging; CTranslate2 is for whoever
    # exports to it; Triton comes with PyTorch for NVIDIA's GPUs.
    used -= {"IPython", "packaging", "ctranslate2", "triton"}
    packages = {
        canonicalize_name({"vl_convert": "vl-convert-python"}.get(name, name))
        for name in used
    }
    assert len(packages) > 8 and "sacrebleu" in packages
    listed = requirements("requirements.txt")
    listed = {canonicalize_name(r.name) for r in listed}
    assert listed >= packages | {"jupytext", "jupyter"}


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


def test_every_work_that_is_named_is_in_the_list():
    """By authors and year, as (Xiong et al., 2020) or Xiong et al. (2020)."""
    text, close = (
        " ".join(re.sub(r"(?m)^# ?", "", part).split())
        for part in notebook.SOURCE.read_text(encoding="utf-8").split(
            "# ## Close\n"
        )
    )
    year = r"(?:18|19|20)\d\d"
    names = r"[A-Z]\w+(?: and [A-Z]\w+| et al\.)?"
    named = {
        (m[1], m[2]) for m in re.finditer(rf"({names}),? \(?({year})\b", text)
    }
    named -= {("In", "2017"), ("Before", "2017"), ("WMT", "2014")}
    listed = set(re.findall(rf"\* ({names}) \(({year})\), \*", close))
    assert len(named) > 20
    assert named <= listed, sorted(named - listed)
