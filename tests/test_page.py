"""The book as one page, as far as it can be read without a browser."""

import json
import re
from html.parser import HTMLParser

import nbformat
import pytest
from bs4 import BeautifulSoup

from tools import notebook, page, prose

SECTION = re.compile(r"\b(Section|Equation) (\d+(?:\.\d+)*)")


def read_page(path):
    return BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")


@pytest.fixture(scope="module")
def html(built):
    return read_page(built)


@pytest.fixture(scope="module")
def cells():
    return nbformat.read(page.NOTEBOOK, as_version=4).cells


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A function: the page of some cells; a str is prose below a title."""
    monkeypatch.setattr(page, "chart_library", lambda cells: "")

    def make(*cells):
        new = nbformat.v4.new_markdown_cell
        cells = [new(c) if isinstance(c, str) else c for c in cells]
        book = nbformat.v4.new_notebook(cells=[new("# A book"), *cells])
        for index, cell in enumerate(book.cells):
            cell.id = str(index)
        nbformat.write(book, tmp_path / "book.ipynb")
        page.build(tmp_path / "book.ipynb", tmp_path / "book.html")
        return read_page(tmp_path / "book.html")

    return make


def code(source, *outputs, **metadata):
    """A code cell that was run."""
    return nbformat.v4.new_code_cell(
        source, outputs=[*outputs], execution_count=1, metadata=metadata
    )


def stream(text):
    return nbformat.v4.new_output("stream", name="stdout", text=text)


def chart(spec):
    """A chart's output, its image one pixel large."""
    png = (
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhf"
        "DwAChwGA60e6kgAAAABJRU5ErkJggg=="
    )
    data = {"application/vnd.vegalite.v5+json": spec, "image/png": png}
    return nbformat.v4.new_output("display_data", data | {"text/plain": "x"})


def charts(cells):
    """The charts' specifications in the notebook, in order."""
    data = [o.get("data", {}) for c in cells for o in c.get("outputs", [])]
    return [d[k] for d in data for k in d if k.startswith(page.CHART)]


def texts(html):
    """The prose's paragraphs, table cells and list items."""
    found = html.article.find_all(["p", "td", "li"])
    return [tag for tag in found if not tag.find_parent(class_="cell")]


class Nesting(HTMLParser):
    """What an end tag finds open, where that is not its own beginning.

    A block ends a paragraph that is open, as in a browser.
    """

    VOID = {"br", "hr", "img", "input", "link", "meta", "source", "wbr"}
    BLOCKS = {"div", "details", "figure", "ol", "p", "pre", "table", "ul"}

    def __init__(self, text):
        super().__init__()
        self.open, self.astray = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag in self.BLOCKS and self.open[-1:] == ["p"]:
            self.open.pop()
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """An element without content, as SVG has them."""

    def handle_endtag(self, tag):
        if self.open[-1:] == [tag]:
            self.open.pop()
        else:
            self.astray.append((self.getpos(), tag, self.open[-1:]))


# The book's own page


def test_every_element_ends_where_it_began(built):
    found = Nesting(built.read_text(encoding="utf-8"))
    assert not found.astray and not found.open


def test_every_link_inside_has_one_target(html):
    names = [tag["id"] for tag in html.find_all(id=True)]
    assert len(names) == len(set(names))
    links = html.select('a[href^="#"]')
    assert len(links) > 150
    assert {a["href"][1:] for a in links} - {"top"} <= set(names)


def test_nothing_is_fetched(html, built):
    for name in ("src", "srcset", "data", "poster", "action"):
        for tag in html.find_all(attrs={name: True}):
            assert tag[name].startswith("data:"), tag.name
    assert not html.find_all(["link", "iframe", "object", "embed", "base"])
    styles = " ".join(tag.text for tag in html.find_all("style"))
    assert "@import" not in styles
    assert all(
        url.startswith('"data:') for url in re.findall(r"url\((.{6})", styles)
    )


def test_the_page_is_small_enough(built):
    assert built.stat().st_size < page.MAX_BYTES


def test_all_code_is_there_as_it_was_written(html, cells):
    shown = [pre.text for pre in html.select(".cell .code pre")]
    written = [c.source for c in cells if c.cell_type == "code"]
    assert [s.strip() for s in shown] == [s.strip() for s in written]


def test_all_that_was_printed_is_there(html, cells):
    printed = [
        line
        for cell in cells
        for out in cell.get("outputs", [])
        for line in out.get("text", "").splitlines()
    ]
    shown = "\n".join(tag.text for tag in html.select(".out, .holds, .claim"))
    lines = [line for line in shown.split("\n") if line.strip()]
    assert lines == [line for line in printed if line.strip()]


def test_all_charts_are_there_with_image_data_and_text(html, cells):
    figures = html.select("figure.chart")
    specs = charts(cells)
    assert len(figures) == len(specs) > 10
    for figure, spec in zip(figures, specs):
        assert json.loads(figure.script.text) == spec
        assert figure.img["alt"] == spec["description"]
        assert int(figure.img["width"]) > 100 < int(figure.img["height"])


def test_every_picture_has_a_text(html, cells):
    source = "".join(c.source for c in cells if c.cell_type == "markdown")
    pictures = html.select("figure.picture")
    assert len(pictures) == len(re.findall(r"!\[", source))
    for picture in pictures:
        drawn = picture.svg or picture.img
        assert len(drawn.get("aria-label") or drawn["alt"]) > 20
    assert all(img["alt"] for img in html.find_all("img"))


def test_headings_form_a_tree_and_the_contents_have_them(html):
    """All but the exercises, which stand at the end of many sections."""
    headings = html.article.find_all(re.compile(r"^h[1-6]$"))
    levels = [int(h.name[1]) for h in headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(levels, levels[1:]))
    entries = [(a["href"][1:], a.text) for a in html.nav.find_all("a")]
    listed = [h for h in headings[1:] if h.text != "Exercises"]
    assert entries == [(h["id"], h.text) for h in listed]
    assert len(listed) < len(headings) - 1
    for heading in headings[1:]:
        assert heading.parent.a["href"] == f"#{heading['id']}"
        assert heading.find_parent("section")["data-for"] == heading["id"]


def test_no_line_of_a_paragraph_is_taken_for_a_list(cells):
    """As where a sentence's "1." comes to stand at the head of a line."""
    item = r"(1[.)]|[-+*]) "
    for cell in cells:
        lines = cell.source.split("\n") if cell.cell_type == "markdown" else []
        for before, line in zip(lines, lines[1:]):
            inside = re.match(r"$|  |\d+[.)] |[-+*] |<", before)
            assert inside or not re.match(item, line), line


def test_sections_and_equations_named_in_the_text_are_links(html):
    """Where the book has the section that is named, or the equation."""
    numbers = {}
    for heading in html.article.find_all(["h2", "h3", "h4"]):
        if found := prose.NUMBERED.match(heading.text):
            for number in found[1].split(", "):
                numbers.setdefault(("Section", number), heading["id"])
    for formula in html.select(".formula[id^=equation]"):
        number = formula.select_one("a.number").text.strip("()")
        numbers["Equation", number] = formula["id"]
    assert {("Equation", n) for n in "123"} <= set(numbers)
    links = 0
    for paragraph in texts(html):
        for kind, number in SECTION.findall(paragraph.text):
            if place := numbers.get((kind, number)):
                text = f"{kind} {number}"
                [*found] = [a for a in paragraph("a") if a.text == text]
                assert {a["href"] for a in found} == {f"#{place}"}, text
                links += 1
    assert links >= 10


def test_every_aside_on_the_paper_is_a_note(html):
    notes = html.select('.note[role="note"]')
    assert len(notes) >= 6
    for paragraph in html.article.find_all("p"):
        first = next(paragraph.children, None)
        if first is not None and prose.ASIDE.match(first.text):
            assert paragraph in notes
    assert all(note.text.count("(") == note.text.count(")") for note in notes)


def test_every_formula_is_set(html, cells):
    source = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    formulas = html.select(".formula")
    assert len(formulas) == source.count("$$") / 2
    assert "$" not in "".join(p.text for p in html.article.find_all("p"))
    for formula in formulas:
        assert formula.math and formula.a["href"] == f"#{formula['id']}"
        assert not re.search(r"\\[a-z]", formula.math.text)


def test_what_is_optional_is_folded(html, cells):
    plumbing = [
        c for c in cells if notebook.FOLDED & {*c.metadata.get("tags", [])}
    ]
    folded = [tag.pre.text.strip() for tag in html.select(".cell details")]
    assert {c.source.strip() for c in plumbing} <= set(folded)
    assert all(tag.summary.text.strip() for tag in html.select("details"))


def test_the_page_has_a_name_a_language_and_no_trace_of_a_machine(html, built):
    assert html.html["lang"] == "en"
    assert html.title.text == html.h1.text
    assert (
        len(html.find("meta", attrs={"name": "description"})["content"]) > 40
    )
    text = built.read_text(encoding="utf-8")
    assert str(page.ROOT) not in text


def test_the_same_notebook_gives_the_same_bytes(built, tmp_path):
    page.build(page.NOTEBOOK, tmp_path / "again.html")
    assert (tmp_path / "again.html").read_bytes() == built.read_bytes()


# Its rules, one by one


@pytest.mark.parametrize(
    "source, text, note",
    [
        ("*Beyond the paper*: more.", None, "Beyond the paper: more."),
        ("(*Beyond the paper*: more.)", None, "Beyond the paper: more."),
        (
            "Zero. (*Differs from the paper*, which\nwrites −∞. (So.) Fine.)",
            "Zero.",
            "Differs from the paper, which writes −∞. (So.) Fine.",
        ),
        (
            "`a` holds.\n*Fills a gap in the paper*: how.",
            "a holds.",
            "Fills a gap in the paper: how.",
        ),
        ("> By the way.", None, "By the way."),
        ("Text with *Beyond the paper*, here.", "Text with ", None),
        ("Why. *Beyond the paper* marks more.", "Why.", None),
    ],
)
def test_asides_become_notes(make, source, text, note):
    article = make(source).article
    notes = [tag.text.strip() for tag in article.select('.note[role="note"]')]
    assert notes == ([note] if note else [])
    texts = [p.text for p in article.find_all("p", class_=False)]
    if text:
        assert texts[0].startswith(text.strip())
        assert not texts[0].rstrip().endswith("(")


def test_the_first_heading_of_a_number_stands_for_it(make):
    article = make(
        "See Section\n6.1, Sections 1, 2 and 7.2, and Section 9.",
        "## 1, 2 Why\n\n## 6.1 Beam\n\n## 6.1 Mean\n\n## 7.2 Last",
    ).article
    assert {a.text: a["href"] for a in article.p.find_all("a")} == {
        "Section 6.1": "#6-1-beam",
        "1": "#1-2-why",
        "2": "#1-2-why",
        "7.2": "#7-2-last",
    }


def test_an_emphasized_title_is_a_link(make):
    article = make(
        "See *The end* and *Beam*, not *the* Beam. [*Beam*](#x)",
        "## 6.1 Beam\n\n## The end",
    ).article
    links = {a.text: a["href"] for a in article.p.find_all("a")[:2]}
    assert links == {"The end": "#the-end", "Beam": "#6-1-beam"}
    assert len(article.p.find_all("a")) == 3


def test_only_equations_that_the_text_numbers_have_a_number(make):
    article = make(
        "Later, Equation 4. Never Equation 5.\n\nNow:\n\n$$a = b$$\n\n"
        "The sum (Equation 4):\n\n$$c = d$$\n\n`Equation 4`"
    ).article
    first, second = article.select(".formula")
    assert first.a.text == "#" and second.a.text == "(4)"
    links = [a for p in article.find_all("p") for a in p.find_all("a")]
    assert [a["href"] for a in links] == ["#equation-4"] * 2


def test_two_headings_of_one_text_have_two_names(make):
    article = make("## The *end*\n\n## The end\n\n# Another title").article
    assert [h["id"] for h in article.find_all("h2")] == [
        *("the-end", "the-end-2", "another-title"),
    ]
    assert len(article.find_all("h1")) == 1


@pytest.mark.parametrize(
    "tex, parts",
    [
        (r"\mathrm{softmax}(x)", ["<mi>softmax</mi>"]),
        (r"\min(a; b)", ["<mi>min</mi>", ">;</mo>"]),
        (r"\mathop{\mathrm{argmax}}\limits_{y}", ["<munder><mi>argmax</mi><"]),
        (r"\log P", [r'<mi>log</mi><mspace width="0.167em" />']),
        (r"\sin(x)", ["<mi>sin</mi><mo"]),
        (r"f\!\left(x\right)", ['width="-0.167em"']),
        (r"\frac{QK^\top}{\sqrt{d_k}}", ["<mfrac>", "<msqrt>", "&#x022A4;"]),
    ],
)
def test_formulas_are_set_as_a_reader_expects(tex, parts):
    result = prose.mathml(tex)
    for part in parts:
        assert part in result


def test_a_formula_may_break_at_a_wide_gap_outside_braces():
    assert prose.pieces_of(r"a, \qquad b") == ["a, ", " b"]
    assert prose.pieces_of(r"\frac{a \qquad b}{c}") == [
        r"\frac{a \qquad b}{c}"
    ]


def test_formulas_within_a_line(make):
    paragraph = make("Here $d_k = 4$ costs 5 $ or 6 $ a head.").article.p
    assert paragraph.math["display"] == "inline"
    assert "5 $ or 6 $" in paragraph.text


def test_a_check_that_holds_is_shown_as_such(make):
    cell = make(code("@check\ndef x(): ...", stream("a\nHolds: It.\nb")))
    cell = cell.select_one(".cell.checked")
    shown = [(tag.name, tag.text) for tag in cell.select(".out, .holds")]
    assert shown == [("pre", "a"), ("p", "Holds: It."), ("pre", "b")]


def test_a_claim_is_shown_with_its_verdict(make):
    found = (
        "Claim, Section 3: It.\nNot reproduced: 1.\nVerified at toy scale: 2."
    )
    cell = make(code("x = 1", stream(found), tags=["claim"])).select_one(
        ".cell"
    )
    kinds = [tag["class"] for tag in cell.select(".claim")]
    assert kinds == [
        ["claim"], ["claim", "found", "not"], ["claim", "found"]
    ]  # fmt: skip
    assert not cell.select(".out")


LONG = "def f():\n    alt.Chart()\n" + "    pass\n" * 25


@pytest.mark.parametrize(
    "cell, summary",
    [
        (code("def f(): ..."), None),
        (code("def f(): ..." + "\n# c" * 40), None),
        (code(LONG), "Code: f, 27 lines"),
        (code("x = 1", tags=["plumbing"]), "Code: x, 1 line"),
        (code("import os", tags=["plumbing"]), "Code: 1 line"),
        (code("A, B = 1, 2\nclass C: ...", tags=["plumbing"]), "A, B and C"),
        (code("a = b = c = d = e = 1", tags=["plumbing"]), "c and 2 more"),
    ],
)
def test_cells_that_may_be_skipped_are_folded(make, cell, summary):
    found = make(cell).select_one("details > summary")
    assert (found is None) == (summary is None)
    if found:
        assert summary in found.text


def test_markup_in_code_and_charts_stays_text(make):
    text = "</script><b>&amp;"
    cell = code(f'x = "{text}"', chart({"description": text}), stream(text))
    html = make(cell)
    assert html.select_one(".code pre").text == f'x = "{text}"'
    assert html.select_one(".out").text == text
    assert json.loads(html.figure.script.text)["description"] == text
    assert html.figure.img["alt"] == text
    assert not html.b


def test_an_empty_head_of_a_table_is_no_heading(make):
    html = make("| a | | b |\n|---|---|---|\n| 1 | 2 | 3 |")
    names = [tag.name for tag in html.thead.tr.find_all(True)]
    assert names == ["th", "td", "th"]
    assert {th["scope"] for th in html.find_all("th")} == {"col"}


def test_comments_of_the_source_are_left_out(make):
    assert "secret" not in str(make("Text.\n\n<!-- secret -->\n\nMore."))


SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"
aria-labelledby="t"><title id="t">A tip</title><style>.d {fill: red}</style>
<path class="d" d="M0 0h9"/></svg>"""


@pytest.mark.parametrize(
    "source",
    [
        "![Two heads.](images/heads.svg)",
        "![Two heads.][heads]\n\n[heads]: data:image/png;base64,iVBORw0KGgo=",
    ],
)
def test_a_drawing_is_part_of_the_page(make, monkeypatch, tmp_path, source):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "heads.svg").write_text(SVG)
    figure = make(source).figure
    assert figure.parent.name != "p"
    assert figure.svg["role"] == "img"
    assert figure.svg["aria-label"] == "Two heads."
    assert "aria-labelledby" not in figure.svg.attrs
    assert figure.svg.path["class"] == ["d"]
    assert not figure.find_all(["style", "title", "img"])


def test_drawings_have_both_themes_colours(monkeypatch, tmp_path):
    module = tmp_path / "drawings.py"
    pairs = {"fill": ("none", "none"), "stroke": ("#111", "#eee")}
    module.write_text(f"COLOURS = {{'d-line': {pairs}}}")
    monkeypatch.setattr(prose, "DRAWINGS", module)
    assert prose.drawing_colours().split("\n")[0] == (
        ".picture .d-line { fill: none; stroke: #111; "
        "stroke: light-dark(#111, #eee); }"
    )


# What can be wrong


def test_a_missing_notebook_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"no\.ipynb.*make notebook"):
        page.build(tmp_path / "no.ipynb", tmp_path / "out.html")


def test_a_notebook_that_was_not_run_is_refused(make):
    idle = nbformat.v4.new_code_cell("@check\ndef x(): ...")
    with pytest.raises(SystemExit, match=r"book\.ipynb: 1 .*make notebook"):
        make(idle)


def test_a_missing_picture_is_named(make):
    with pytest.raises(SystemExit, match=r"images/no\.svg .*drawings\.py"):
        make("![A thing.](images/no.svg)")


def test_a_picture_needs_words(make):
    with pytest.raises(SystemExit, match=r"heads\.svg.*description"):
        make("![](images/heads.svg)")


def test_a_chart_needs_words(make):
    with pytest.raises(SystemExit, match="chart needs a description"):
        make(code("x = 1", chart({"mark": "bar"})))


def test_a_page_too_large_is_refused(make, monkeypatch):
    monkeypatch.setattr(page, "MAX_BYTES", 1000)
    with pytest.raises(SystemExit, match="over 1,000"):
        make("Text.")


def test_symbols_in_the_text_have_subscripts_and_code_has_not(html):
    text = next(p for p in html.article.find_all("p") if "d_k = 2" in p.text
                or "so dk = 2" in p.text)  # fmt: skip
    assert text.find("sub").text == "k" and text.find("var").text == "d"
    assert "d_model" in html.article.find("pre").find_parent("article").text
    assert not html.select("pre sub") and not html.select("code sub")


def test_no_line_ends_inside_an_option(html):
    """`--preset laptop` may break at the blank, and nowhere else."""
    options = {span.text for span in html.select("code .option")}
    assert {"--preset", "--no-half", "--alpha"} <= options
    assert not html.select("pre .option")
    for option in options:
        assert " " not in option and option.startswith("-")
