"""Write the book's notebook as one page to read, which needs nothing else.

python tools/page.py OUT.html

Prose, code, outputs, live charts and what draws them, pictures and a font
for formulas all lie in the one file, so it asks no host for anything. What
it looks like stands in tools/page/.
"""

import ast
import base64
import json
import re
import sys
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template

import nbformat
import vl_convert

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.notebook import FOLDED  # noqa: E402
from tools.prose import (  # noqa: E402
    Prose,
    code_block,
    drawing_colours,
    plain,
    scrolling,
)

PARTS = ROOT / "tools" / "page"
NOTEBOOK = ROOT / "notebooks" / "annotated_transformer.ipynb"
MAX_BYTES = 6_000_000
LONG = 25  # lines: a cell that draws a chart and is longer is folded
SCALE = 1.5  # pixels of a chart's stored image to one on the page
LETTERS, LETTERS_IF_SMALL = 78, 88  # of printed lines in that column
COLUMN = 672  # the width of the page's column in pixels, see style.css
CHART = "application/vnd.vegalite"


def defined(source):
    """Return the names that a cell defines."""
    names = []
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = getattr(node, "targets", None) or [node.target]
            for target in targets:
                parts = getattr(target, "elts", [target])
                names += [part.id for part in parts if hasattr(part, "id")]
    return names


def folded(cell):
    """Return whether a cell is of no use to the reader of the text."""
    if FOLDED.intersection(cell.metadata.get("tags", [])):
        return True
    draws = re.search(r"\balt\.", cell.source)
    return bool(draws) and cell.source.count("\n") >= LONG


def summary(source):
    """Return what stands on a folded cell: what it defines, how long it is."""
    names = [f"<code>{escape(name)}</code>" for name in defined(source)]
    if len(names) > 4:
        names[3:] = [f"{len(names) - 3} more"]
    listed = " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    lines = source.count("\n") + 1
    size = f"{lines} line{'s' * (lines > 1)}"
    return f"Code: {listed}, {size}" if listed else f"Code: {size}"


def code_cell(cell, prose):
    """Return a code cell and its outputs as HTML."""
    source = cell.source.strip("\n")
    html = code_block(source)
    if folded(cell):
        label = summary(source)
        html = f"<details><summary>{label}</summary>\n{html}</details>\n"
    outputs = "".join(output(out, cell, prose) for out in cell.outputs)
    kind = "cell checked" if "@check" in source else "cell"
    return f'<div class="{kind}">\n{html}{outputs}</div>\n'


def output(out, cell, prose):
    """Return one output of a cell: a chart, an image or text."""
    data = out.get("data", {})
    for kind, spec in data.items():
        if kind.startswith(CHART) and "image/png" in data:
            return chart(spec, data["image/png"], cell, prose)
    if table := data.get("text/markdown"):
        return prose.markdown.render(table)
    if png := data.get("image/png"):
        return f"<figure>{image(png, data['text/plain'])}</figure>\n"
    if "text" not in out and "text/plain" not in data:
        sys.exit(f"the page can't show what this cell gives:\n{cell.source}")
    return printed(out.get("text") or data["text/plain"])


REPORTS = {  # how a line begins that reports something, and its class
    "Holds: ": "holds",
    "Claim, ": "claim",
    "Verified": "claim found",
    "Not reproduced: ": "claim found not",
    "Undecided: ": "claim found untried",
    "Can't be checked here: ": "claim found untried",
    "Right, on all": "holds",
}


def report(line):
    """Return the class of a line that reports a check or a claim, or ''."""
    kinds = (kind for start, kind in REPORTS.items() if line.startswith(start))
    return next(kinds, "")


def printed(text):
    """Return printed lines; those that report something get a sign."""
    html = ""
    for kind, lines in groupby(text.rstrip().split("\n"), report):
        if kind:
            html += "".join(
                f'<p class="{kind}">{escape(line)}</p>\n' for line in lines
            )
        else:
            inner = "\n".join(lines).strip("\n")
            longest = max(map(len, inner.split("\n")))
            small = " small" * (LETTERS < longest <= LETTERS_IF_SMALL)
            inner = escape(inner, quote=False)
            html += f'<pre class="out scroll{small}">{inner}</pre>\n'
    return html


def image(png, words):
    """Return a chart's stored image at its proper size."""
    png = png.replace("\n", "")
    head = base64.b64decode(png[:64])
    width, height = (
        round(int.from_bytes(head[place : place + 4], "big") / SCALE)
        for place in (16, 20)
    )
    return (
        f'<img alt="{escape(words)}" width="{width}" height="{height}"'
        f' loading="lazy" src="data:image/png;base64,{png}">'
    )


def chart(spec, png, cell, prose):
    """Return a chart as its image, with all that a live one needs."""
    words = spec.get("description")
    if not words:
        sys.exit(f"a chart needs a description; its cell:\n{cell.source}")
    name = prose.name(f"figure {(defined(cell.source) or ['chart'])[-1]}")
    text = json.dumps(spec, separators=(",", ":"), ensure_ascii=False)
    text = text.replace("<", r"\u003c")  # lest it end the script
    still = image(png, words)
    wide = " wide" * (int(re.search(r'width="(\d+)"', still)[1]) > COLUMN)
    return (
        f'<figure class="chart{wide}" id="{name}">{scrolling(still, "view")}'
        f'<script type="application/json">{text}</script></figure>\n'
    )


def chart_library(cells):
    """Return the program that draws the charts, in the charts' version."""
    texts = (
        spec["$schema"]
        for cell in cells
        for out in cell.get("outputs", [])
        for kind, spec in out.get("data", {}).items()
        if kind.startswith(CHART)
    )
    versions = {re.search(r"/v(\d+\.\d+)", text)[1] for text in texts}
    if not versions:
        return ""
    program = vl_convert.javascript_bundle(
        snippet="window.vegaEmbed = vegaEmbed;", vl_version=max(versions)
    )
    return re.sub(r"<(?=/script|!--)", r"\\x3c", program, flags=re.I)


# The page


def read(path):
    """Return the notebook, or stop if it is missing or was not run."""
    if not path.exists():
        sys.exit(f"{path.name} is not there; `make notebook` makes it")
    cells = nbformat.read(path, as_version=4).cells
    shows = [
        c for c in cells if re.search("^@(example|check)", c.source, re.M)
    ]
    idle = [cell for cell in shows if not cell.get("outputs")]
    if idle:
        sys.exit(
            f"{path.name}: {len(idle)} of the {len(shows)} cells that show"
            " something were not run; `make notebook` runs them"
        )
    return cells


def build(notebook_path, out_path):
    """Write the page of a notebook."""
    cells = read(Path(notebook_path))
    prose = Prose(cells)
    body = "".join(
        prose.render(cell) + "\n"
        if cell.cell_type == "markdown"
        else code_cell(cell, prose)
        for cell in cells
    )
    first = re.search(r"<p>(.*?[.!?])\s", body, re.S)
    parts = {
        "title": escape(plain(prose.headings[0][2])),
        "description": escape(plain(first[1])) if first else "",
        "font": base64.b64encode((PARTS / "math.woff2").read_bytes()).decode(),
        "drawings": drawing_colours(),
        "contents": prose.contents(),
        "body": body + prose.close(),
        "library": chart_library(cells),
    }
    for name in ("style.css", "page.js", "template.html"):
        parts[name.split(".")[0]] = (PARTS / name).read_text(encoding="utf-8")
    page = Template(parts.pop("template")).substitute(parts)
    size = len(page.encode("utf-8"))
    if size > MAX_BYTES:
        sys.exit(f"the page has {size:,} bytes, over {MAX_BYTES:,}; draw less")
    out = Path(out_path)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8", newline="\n")
    print(f"wrote {out.name}: {size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].endswith(".html"):
        sys.exit(__doc__)
    build(NOTEBOOK, sys.argv[1])
