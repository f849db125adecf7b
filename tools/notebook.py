"""Make notebooks/annotated_transformer.ipynb from annotated_transformer.py.

python tools/notebook.py execute [OUT.ipynb]  run all, write the notebook
python tools/notebook.py sync                 source to notebook, run nothing
python tools/notebook.py check                fail where the two differ
python tools/notebook.py pictures             write images/ from its charts
"""

import base64
import difflib
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
import vl_convert
from nbclient import NotebookClient
from nbclient.exceptions import CellControlSignal, DeadKernelError
from PIL import Image, PngImagePlugin

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "annotated_transformer.py"
NOTEBOOK = ROOT / "notebooks" / "annotated_transformer.ipynb"
IMAGES = ROOT / "images"
PICTURES = {"cross-attention": "cross_attention_of_a_sentence"}
MAX_BYTES = 4_000_000
CELL_SECONDS = 1800
COLOURS = 128  # of a stored picture: no eye tells them from all
SCALE = 1.4  # pixels of a stored picture for one of its drawing
PICTURE = re.compile(r"\n\n\[[\w-]+\]: data:image/png;base64,(\S+)")
FOLDED = {"plumbing", "claim", "exercise", "question"}  # folded cells' tags
WIDGET = "application/vnd.jupyter.widget-view+json"
CHART = "application/vnd.vegalite"
# No versions: they would change the notebook on each reader's machine.
METADATA = {
    "kernelspec": {"display_name": "Python 3", "name": "python3"},
    "language_info": {"name": "python", "file_extension": ".py"},
}


def read_source():
    """Return the source as a notebook without outputs.

    A cell's id comes from its text, so it stays when others move. What is
    optional is folded in Jupyter, in Colab and on Kaggle. Titles become links.
    """
    book = jupytext.read(SOURCE, fmt="py:percent")
    book.metadata = nbformat.from_dict(METADATA)
    seen, drawn, places = {}, stored_pictures(), anchors(book)
    for cell in book.cells:
        copy = seen[cell.source] = seen.get(cell.source, 0) + 1
        text = f"{cell.cell_type} {copy} {cell.source}"
        cell.id = hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]
        if FOLDED.intersection(cell.metadata.get("tags", [])):
            cell.metadata.jupyter = {"source_hidden": True}
            cell.metadata.cellView = "form"
            cell.metadata["_kg_hide-input"] = True
        if cell.cell_type == "markdown":
            cell.source = embedded(linked(cell.source, places), drawn)
    return book


def anchors(book):
    """Return {title: name} of the headings, as JupyterLab names them.

    A title may be told without its number. Those that stand twice are no
    place to go to.
    """
    found = [
        re.sub(r"[*`]", "", title)
        for cell in book.cells
        if cell.cell_type == "markdown"
        for title in re.findall(r"(?m)^#{1,6} (.+)$", cell.source)
    ]
    names = {}
    for title in found:
        if found.count(title) == 1:
            plain = re.sub(r"^[\d., ]+", "", title)
            name = title.replace(" ", "-")
            names |= {title: name} | ({plain: name} if " " in plain else {})
    return names


def linked(text, places):
    """Return Markdown where the title of a section, in italics, is a link."""

    def link(match):
        name = places.get(" ".join(match[1].split()))
        return f"[{match[0]}](#{name})" if name else match[0]

    return re.sub(r"(?<![*\w])\*(?=\S)([^*`]+)(?<=\S)\*(?![*\w])", link, text)


def embedded(text, drawn):
    """Return Markdown with the pictures of images/ inside.

    As PNG in a data URL: of all ways to put a picture into a notebook this
    is the one that Jupyter, VS Code, Colab, nbviewer and GitHub all show, and
    that survives being run anew. Paths break, attachments fail in Colab, and
    VS Code refuses SVG.

    A drawing that has not changed keeps its picture in `drawn`: another
    machine, with other fonts, would paint its letters otherwise.
    """
    names = []

    def reference(match):
        names.append(match[2])
        return f"![{' '.join(match[1].split())}][{match[2]}]"

    text = re.sub(r"!\[([^\]]*)\]\(images/([\w-]+)\.svg\)", reference, text)
    for name in names:
        path = IMAGES / f"{name}.svg"
        if not path.exists():
            sys.exit(f"{path.name} is missing; tools/drawings.py draws it")
        svg = path.read_text(encoding="utf-8")
        key = f"on white {SCALE} {COLOURS} {svg}".encode()
        origin = hashlib.sha256(key).hexdigest()
        if origin not in drawn:
            png = vl_convert.svg_to_png(svg, SCALE)
            data = base64.b64encode(png).decode("ascii")
            drawn[origin] = smaller(data, origin)
        text += f"\n\n[{name}]: data:image/png;base64,{drawn[origin]}"
    return text


def with_paths(text):
    """Return Markdown as it was before that, but for line ends."""
    text = re.sub(r"\[(\*[^*]+\*)\]\(#\S*?\)(?!-)", r"\1", text)
    text = PICTURE.sub("", text)
    return re.sub(r"(!\[[^\]]*\])\[([\w-]+)\]", r"\1(images/\2.svg)", text)


def stored_pictures():
    """Return the notebook's pictures by what each was painted from."""
    drawn = {}
    if NOTEBOOK.exists():
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
            if cell.cell_type == "markdown":
                for data in PICTURE.findall(cell.source):
                    image = Image.open(io.BytesIO(base64.b64decode(data)))
                    drawn[image.info.get("Source")] = data
    return drawn


def read_notebook():
    """Return the written notebook, or stop and say how to make it."""
    if not NOTEBOOK.exists():
        sys.exit(f"{NOTEBOOK.name} is not there; `make notebook` makes it")
    return nbformat.read(NOTEBOOK, as_version=4)


def write(book, path):
    """Write the notebook at once or not at all, within MAX_BYTES.

    Without counters: a new cell would change those of all that follow.
    """
    for cell in book.cells:
        if cell.cell_type == "code":
            cell.execution_count = None
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    text = nbformat.writes(book) + "\n"
    size = len(text.encode("utf-8"))
    if size > MAX_BYTES:
        kept = ROOT / "build" / "too-large.ipynb"
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text, encoding="utf-8", newline="\n")
        sys.exit(
            f"{path.name}: {size:,} bytes, over {MAX_BYTES:,}; draw less "
            f"(it is kept as {kept.relative_to(ROOT)})"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    os.replace(part, path)
    print(f"wrote {path.name}: {len(book.cells)} cells, {size:,} bytes")


def first_lines(book):
    """Return the source's line where each code cell starts; 0 for prose."""
    text = "\n" + SOURCE.read_text(encoding="utf-8")
    lines, end = [], 0
    for cell in book.cells:
        start = text.find("\n" + cell.source, end)
        if cell.cell_type == "code" and start >= 0:
            end = start + len(cell.source)
            lines.append(text.count("\n", 0, end - len(cell.source) + 1))
        else:
            lines.append(0)
    return lines


def execute(path):
    """Run the book as its reader would who has the notebook file alone.

    The working folder is empty but for the published model, and real data is
    not offered, so the notebook depends on no other file of this repository.
    """
    book = read_source()
    lines = first_lines(book)
    # This Python's kernel, and not one that a user's settings call the same.
    os.environ.pop("JUPYTER_PATH", None)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    client = NotebookClient(
        book,
        kernel_name="python3",
        timeout=CELL_SECONDS,
        iopub_timeout=CELL_SECONDS,  # on a busy machine outputs come late
        raise_on_iopub_timeout=True,
        record_timing=False,
        coalesce_streams=True,
        extra_arguments=["--log-level=ERROR"],
    )
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch, "book")
        folder.mkdir()
        for model in (ROOT / "results").glob("model-*"):
            shutil.copytree(model, folder / "results" / model.name)
        # IPython's own folder too: the user's start-up files stay out.
        environment = os.environ | {"IPYTHONDIR": f"{scratch}/ipython"}
        environment.pop("ANNOTATED_TRANSFORMER_DATA", None)
        with client.setup_kernel(cwd=str(folder), env=environment):
            for index, cell in enumerate(book.cells):
                if cell.cell_type == "code":
                    execute_cell(client, index, lines)
    print(f"ran in {time.perf_counter() - began:.0f} s{peak_memory()}")
    if path.resolve() == NOTEBOOK.resolve() and path.exists():
        kept = ROOT / "build" / "previous.ipynb"  # a reader's answers, say
        kept.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, kept)
    write(book, path)


def execute_cell(client, index, lines):
    """Run one cell and tell its line and time, or stop at its error."""
    cell = client.nb.cells[index]
    head = cell.source.partition("\n")[0]
    place = f"[{index + 1:>3}/{len(lines)}] line {lines[index]:>5}"
    print(f"{place}  {head:<45.45}", end=" ", flush=True)
    start = time.perf_counter()
    try:
        client.execute_cell(cell, index)
    except (CellControlSignal, DeadKernelError) as error:
        print("failed", flush=True)
        sys.exit(explain(error, client.nb, index, lines))
    print(f"{time.perf_counter() - start:7.1f} s", flush=True)
    cell.outputs = [output for output in cell.outputs if lasting(output)]
    for output in cell.outputs:
        if picture := output.get("data", {}).get("image/png"):
            output.data["image/png"] = smaller(picture)
            # nbconvert, and so nbviewer, asks here for the picture's words
            words = {"alt": output.data["text/plain"]}
            output.metadata["image/png"] = words


def lasting(output):
    """Return whether an output belongs in the file; show what does not.

    Standard error holds progress bars and warnings, which tell of one run on
    one machine; a live widget is blank without its kernel.
    """
    if output.get("name") == "stderr":
        print(output.text.rpartition("\r")[2].rstrip(), file=sys.stderr)
        return False
    return WIDGET not in output.get("data", {})


def smaller(picture, origin=None):
    """Store a PNG in Base64 with a palette, in a third of the space.

    With `origin`, the picture itself says what it was painted from.
    """
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    white = Image.new("RGBA", image.size, "white")  # else corners are black
    opaque = Image.alpha_composite(white, image.convert("RGBA"))
    shades = opaque.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    data = io.BytesIO()
    resolution = image.info.get("dpi")
    kept = {"dpi": resolution} if resolution else {}
    if origin:
        kept["pnginfo"] = PngImagePlugin.PngInfo()
        kept["pnginfo"].add_text("Source", origin)
    shades.save(data, "PNG", optimize=True, **kept)
    return base64.b64encode(data.getvalue()).decode("ascii")


def explain(error, book, index, lines):
    """Return the traceback with the source's lines in place of the cells'."""
    failed = [o for o in book.cells[index].outputs if "traceback" in o]
    text = "\n".join(failed[-1].traceback) if failed else str(error)
    starts = {
        cell.get("execution_count"): line
        for cell, line in zip(book.cells, lines)
    }

    def in_source(match):
        line = starts.get(int(match[1]), 0) + int(match[2]) - 1
        return f"{SOURCE.name}:{line}"

    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    text = re.sub(r"Cell In ?\[(\d+)\], line (\d+)", in_source, text)
    return (
        f"{text}\n\nThe cell that starts at {SOURCE.name}:{lines[index]}"
        " failed; no notebook was written."
    )


def peak_memory():
    """Return the finished kernel's peak memory, where the system tells it."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024  # bytes or KiB
    return f", peak memory {peak * unit / 2**30:.1f} GiB"


def sync():
    """Copy the source into the notebook; unchanged cells keep outputs."""
    book = read_source()
    if NOTEBOOK.exists():
        old = {}
        for cell in read_notebook().cells:
            old.setdefault((cell.cell_type, cell.source), []).append(cell)
        for cell in book.cells:
            same = old.get((cell.cell_type, cell.source))
            if same and cell.cell_type == "code":
                before = same.pop(0)
                cell.outputs = before.outputs
    write(book, NOTEBOOK)


def differences():
    """Return how the notebook's inputs differ from the source's, or ''."""
    texts = []
    for book in (read_notebook(), read_source()):
        lines = []
        for cell in book.cells:
            tags = cell.metadata.get("tags", [])
            lines += [f"%% {cell.cell_type} {' '.join(tags)}".rstrip()]
            lines += [line[:200] for line in cell.source.splitlines()]
        texts.append(lines)
    names = (NOTEBOOK.name, SOURCE.name)
    return "\n".join(difflib.unified_diff(*texts, *names, lineterm=""))


def check():
    """Fail, with the differences, unless notebook and source agree."""
    found = differences()
    if found:
        sys.exit(
            f"{found}\n\nThe notebook differs from the source.\n"
            "Edited the source: `make notebook` renews the notebook.\n"
            "Edited the notebook: copy the change into the source first."
        )
    print("the notebook and the source agree")


def pictures():
    """Write the charts that the README shows, as SVG."""
    book = read_notebook()
    for name, function in PICTURES.items():
        [cell] = [c for c in book.cells if f"def {function}(" in c.source]
        data = next(o.data for o in cell.outputs if "data" in o)
        [spec] = [data[kind] for kind in data if kind.startswith(CHART)]
        svg = vl_convert.vegalite_to_svg(spec)
        path = IMAGES / f"{name}.svg"
        path.write_text(svg, encoding="utf-8", newline="\n")
        print(f"wrote {path.name}")


def main(arguments):
    """Run the command that the arguments name."""
    match arguments:
        case ["execute"]:
            execute(NOTEBOOK)
        case ["execute", path] if path.endswith(".ipynb"):
            execute(Path(path))
        case ["sync"]:
            sync()
        case ["check"]:
            check()
        case ["pictures"]:
            pictures()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
