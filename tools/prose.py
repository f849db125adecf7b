"""The prose of the book as HTML: sections, notes, formulas, pictures, links.

Made of the notebook's Markdown; tools/page.py puts the page together.
"""

import re
import runpy
import sys
import xml.etree.ElementTree as ET
from html import escape, unescape
from pathlib import Path

from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

ROOT = Path(__file__).resolve().parent.parent
DRAWINGS = ROOT / "tools" / "drawings.py"
SVG = "http://www.w3.org/2000/svg"

NUMBER = r"\d+(?:\.\d+)*"
SYMBOL = re.compile(  # in running text
    r"\b([dWPbε])_(model|ff|drop|ls|[kv1-9A-Z])\b"
)
SUBSCRIPT = r"<var>\1</var><sub>\2</sub>"
REFERENCE = re.compile(
    rf"(Section|Equation)s? {NUMBER}(?:(?:,|,? and| to) {NUMBER})*"
)
NUMBERED = re.compile(rf"({NUMBER}(?:, {NUMBER})*) ")  # a heading's start
ASIDE = re.compile(
    r"(Differs from|Beyond|Fills (a gap|gaps) in) th(e|at) \w+[,:]"
)


def plain(text):
    """Return the text of some HTML."""
    return unescape(re.sub(r"<[^>]+>", "", text))


def scrolling(inner, kind):
    """Wrap what may be wider than the column, so that it scrolls itself."""
    return f'<div class="scroll {kind}">{inner}</div>'


def code_block(source, language="python"):
    """Return coloured code in a box of its own."""
    lexer = get_lexer_by_name(language)
    text = highlight(source, lexer, HtmlFormatter(nowrap=True)).rstrip()
    text = re.sub(r'<span class="(?:n|p|o|w|nn)">([^<]*)</span>', r"\1", text)
    inner = f'<pre class="scroll"><code>{text}</code></pre>'
    return f'<div class="code">{inner}</div>\n'


# Formulas


def pieces_of(tex):
    """Cut a formula at its wide gaps, where a narrow screen may break it."""
    pieces = re.split(r"\\qquad", tex)
    whole = all(piece.count("{") == piece.count("}") for piece in pieces)
    return pieces if whole else [tex]


def mathml(tex, display="block"):
    """Convert TeX to MathML, and set right what browsers would set badly.

    The letters of an upright name are one identifier, a function without
    brackets keeps its distance, dots keep none, and a semicolon is an
    operator.
    """
    letters = r'(?:<mi mathvariant="normal">\w</mi>){2,}'
    text = convert(tex.strip(), display=display)
    text = re.sub(
        rf"<mrow>({letters})</mrow>",
        lambda match: f"<mi>{escape(plain(match[1]), quote=False)}</mi>",
        text,
    )
    text = re.sub(r"<mo>([a-z]{2,})</mo>", r"<mi>\1</mi>", text)
    text = re.sub(r"<mo><mrow>(<mi>\w+</mi>)</mrow></mo>", r"\1", text)
    text = re.sub(
        r"(<mi>(?:sin|cos|tan|log|ln|exp|min|max)</mi>)(?!<mo)",
        r'\1<mspace width="0.167em" />',
        text,
    )
    text = text.replace('"negativethinmathspace"', '"-0.167em"')
    text = text.replace("<mo>&#x02026;</mo>", "<mi>…</mi>")
    return text.replace("<mi>;</mi>", '<mo separator="true">;</mo>')


# Prose


def unlinked(children):
    """Return tokens without the notebook's own links, whose names are others.

    What they enclose stays.
    """
    kept, inside = [], False
    for child in children:
        own = child.type == "link_open" and child.attrs["href"][:1] == "#"
        inside |= own
        if not own and not (inside and child.type == "link_close"):
            kept.append(child)
        inside &= child.type != "link_close"
    return kept


class Prose:
    """The parsed prose of all cells, with the places to link to.

    Reads every cell once to learn the headings and equations, and only then
    renders, since a reference may point forward.
    """

    def __init__(self, cells):
        self.markdown = MarkdownIt("commonmark", {"store_labels": True})
        self.markdown.enable("table")
        self.markdown.use(
            dollarmath_plugin,
            allow_labels=False,
            allow_space=False,
            allow_digits=False,
        )
        for kind in (
            *("heading_open", "heading_close", "table_open", "table_close"),
            *("math_block", "math_inline", "image", "fence", "html_block"),
            "code_inline",
        ):
            self.markdown.add_render_rule(kind, self.rule(kind))
        self.headings, self.open = [], []
        self.taken = {"text", "contents", "library"}  # by the page itself
        self.sections, self.equations, self.titles = {}, {}, {}
        self.tokens = {}
        for cell in cells:
            if cell.cell_type == "markdown":
                tokens = self.markdown.parse(cell.source)
                self.tokens[id(cell)] = tokens
                self.learn(tokens)

    def rule(self, kind):
        """Return a method in the form that the renderer wants."""
        method = getattr(self, kind)
        return lambda _, tokens, index, *rest: method(tokens[index])

    def name(self, text):
        """Return an anchor's name, made of a text, that is not yet taken."""
        words = re.sub(r"['’]", "", plain(text).lower())
        base = re.sub(r"[\W_]+", "-", words).strip("-")
        name, count = base, 1
        while name in self.taken:
            count += 1
            name = f"{base}-{count}"
        self.taken.add(name)
        return name

    def learn(self, tokens):
        """Name the headings and the display formulas of a cell."""
        for index, token in enumerate(tokens):
            if token.type == "heading_open":
                if token.tag == "h1" and self.headings:
                    token.tag = tokens[index + 2].tag = "h2"
                self.learn_heading(token, tokens[index + 1])
                tokens[index + 2].meta = token.meta
            elif token.type == "math_block":
                before = tokens[index - 2] if index > 1 else token
                found = re.search(r"\bEquation\s(\d+)", before.content)
                if found and found[1] not in self.equations:
                    token.meta["number"] = found[1]
                    token.meta["id"] = self.name(f"equation {found[1]}")
                    self.equations[found[1]] = token.meta["id"]
                else:
                    section = self.headings[-1][1] if self.headings else ""
                    token.meta["id"] = self.name(f"{section} formula")

    def learn_heading(self, token, inline):
        """Name a heading; those of a paper's section stand for it."""
        text = self.markdown.renderer.render(
            [inline], self.markdown.options, {}
        )
        level, label = int(token.tag[1]), text
        if text == "Exercises":  # many sections have them
            above = (found for found in self.headings if found[0] < level)
            label = f"{[*above][-1][2]}: {text}"
        token.meta |= {"text": text, "label": label, "id": self.name(label)}
        self.headings.append((level, token.meta["id"], text))
        numbers = NUMBERED.match(text)
        for number in re.findall(NUMBER, numbers[1]) if numbers else ():
            self.sections.setdefault(number, token.meta["id"])
        title = text[numbers.end() :] if numbers else text
        self.titles |= {text: token.meta["id"], title: token.meta["id"]}

    def render(self, cell):
        """Return a prose cell as HTML."""
        tokens, kept = self.tokens[id(cell)], []
        around = [None, *tokens], tokens, [*tokens[1:], None]
        for before, token, after in zip(*around):
            kept.append(token)
            if token.type == "inline":
                self.refine(before, token, after, kept)
            elif token.type.startswith("blockquote"):
                token.tag = "div"
                if token.nesting == 1:
                    token.attrs = {"class": "note", "role": "note"}
        return self.markdown.renderer.render(
            kept, self.markdown.options, {}
        ).strip()

    def refine(self, before, token, after, kept):
        """Link an inline token's references; set apart pictures and asides."""
        token.children = join_lines(unlinked(token.children))
        if before.type == "th_open":
            before.attrs["scope"] = "col"
            if not token.content:
                before.tag, before.attrs, after.tag = "td", {}, "td"
        if before.type != "heading_open":
            self.link(token.children)
        if before.type == "paragraph_open" and token.level == 1:
            if [child.type for child in token.children] == ["image"]:
                before.type, before.hidden = "html_block", False
                before.content = self.image(token.children[0])
                token.children, after.hidden = [], True
                kept[-2:] = [before]
            else:
                set_aside(before, token, kept)

    def link(self, children):
        """Make links of sections and equations named in the text.

        Sections by number, or by title where that is emphasized.
        """
        depth, before = 0, ""
        for child in children:
            depth += child.nesting if child.type.startswith("link") else 0
            if child.type == "text" and not depth:
                text = escape(child.content, quote=False)
                place = self.titles.get(text) if before == "em_open" else None
                child.type = "html_inline"
                child.content = (
                    f'<a href="#{place}">{text}</a>'
                    if place
                    else SYMBOL.sub(
                        SUBSCRIPT, REFERENCE.sub(self.references, text)
                    )
                )
            before = child.type

    def references(self, match):
        """Return a phrase such as "Sections 3.2 and 3.3" with its links."""
        sections = match[1] == "Section"
        places = self.sections if sections else self.equations

        def linked(part):
            place = places.get(part[2])
            return f'<a href="#{place}">{part[0]}</a>' if place else part[0]

        return re.sub(rf"({match[1]} )?({NUMBER})", linked, match[0])

    def close(self, level=0):
        """Return the end tags of the open sections down to a level."""
        ended = 0
        while self.open and self.open[-1] >= level:
            self.open.pop()
            ended += 1
        return "</section>\n" * ended

    def heading_open(self, token):
        """Begin a section; the book's title begins none."""
        level, name = int(token.tag[1]), token.meta["id"]
        start = f'<{token.tag} id="{name}">'
        if level == 1:
            return start
        ended = self.close(level)
        self.open.append(level)
        return f'{ended}<section data-for="{name}">\n<div class="head">{start}'

    def heading_close(self, token):
        """End a heading and put the link to it beside it."""
        if token.tag == "h1":
            return "</h1>\n"
        name, text = token.meta["id"], escape(plain(token.meta["label"]))
        return (
            f'</{token.tag}><a class="anchor" href="#{name}"'
            f' aria-label="Link to “{text}”">#</a></div>\n'
        )

    def table_open(self, token):
        """Begin a table."""
        return '<div class="scroll table"><table>\n'

    def table_close(self, token):
        """End a table."""
        return "</table></div>\n"

    def math_inline(self, token):
        """Return a formula within a line."""
        return mathml(token.content, display="inline")

    def math_block(self, token):
        """Return a display formula with the link to it."""
        name, number = token.meta["id"], token.meta.get("number")
        sign = f"({number})" if number else "#"
        label = f"Equation {number}" if number else "this formula"
        parts = "".join(mathml(part) for part in pieces_of(token.content))
        return (
            f'<div class="formula" id="{name}">{scrolling(parts, "maths")}'
            f'<a class="anchor{" number" if number else ""}" href="#{name}"'
            f' aria-label="Link to {label}">{sign}</a></div>\n'
        )

    def image(self, token):
        """Return a picture of the book as part of the page.

        In the notebook a drawing is an image whose label is the file's name.
        """
        source, words = token.attrs["src"], token.content
        if label := token.meta.get("label"):
            source = f"images/{label.lower()}.svg"
        if not words:
            sys.exit(f"{source}: the picture needs a description")
        html, told = picture(source, words)
        html = scrolling(html, "drawing")
        if told:
            html += (
                "<details><summary>The picture in words</summary>"
                f"<p>{escape(told)}</p></details>"
            )
        if caption := token.attrs.get("title"):
            html += f"<figcaption>{escape(caption)}</figcaption>"
        return f'<figure class="picture">{html}</figure>\n'

    def fence(self, token):
        """Return a block of code that stands in the prose."""
        return code_block(token.content, token.info.strip() or "text")

    def code_inline(self, token):
        """Return code within a line; no line ends inside an option."""
        text = escape(token.content, quote=False)
        option = r'<span class="option">\g<0></span>'
        return (
            f"<code>{re.sub(r'(?<![^ ])--?[a-z][a-z-]*', option, text)}</code>"
        )

    def html_block(self, token):
        """Return HTML as it stands, but for comments."""
        return re.sub(r"<!--.*?-->\s*", "", token.content, flags=re.S)

    def contents(self):
        """Return the table of contents as nested lists, less exercises."""
        html, levels = [], []
        for level, name, text in self.headings[1:]:
            if text == "Exercises":
                continue
            while levels and levels[-1] > level:
                levels.pop()
                html.append("</li></ol>")
            if levels and levels[-1] == level:
                html.append("</li>")
            else:
                levels.append(level)
                html.append("<ol>")
            html.append(f'<li><a href="#{name}">{text}</a>')
        return "".join(html) + "</li></ol>" * len(levels)


def join_lines(children):
    """Return a paragraph's parts with each broken line of text made whole."""
    joined = []
    for child in children:
        if child.type == "softbreak":
            child = Token("text", "", 0, content=" ")
        if child.type == "text" and joined and joined[-1].type == "text":
            joined[-1].content += child.content
        else:
            joined.append(child)
    return joined


def said(children):
    """Return the text of a paragraph's parts."""
    return plain("".join(child.content for child in children))


def set_aside(opening, token, kept):
    """Make a note of what a paragraph says, to its end, about the paper."""
    children = token.children
    for place in range(len(children) - 1):
        before = children[place - 1].content.rstrip() if place else ""
        starts = not before or before[-1] in ".:!?()"
        emphasis = children[place].type == "em_open"
        if starts and emphasis and ASIDE.match(said(children[place:])):
            break
    else:
        return
    note = children[place:]
    if before.endswith("("):
        children[place - 1].content = before = before[:-1].rstrip()
        note[-1].content = note[-1].content.rstrip().removesuffix(")")
    marks = {"class": "note", "role": "note"}
    if place > 1 or before:
        token.children = children[:place]
        end = Token("paragraph_close", "p", -1, block=True)
        start = Token("paragraph_open", "p", 1, block=True, attrs=marks)
        kept += [end, start, Token("inline", "", 0, children=note)]
    else:
        token.children, opening.attrs = note, marks


# Pictures


def picture(source, words):
    """Return a picture as HTML, and what there is to tell of it in words.

    That is a file's drawing, or an image as it is.
    """
    if source.startswith("data:"):
        return f'<img alt="{escape(words)}" src="{source}">', ""
    path = ROOT / source
    if not path.is_file():
        sys.exit(f"{source} is missing; tools/drawings.py draws it")
    return drawing(path.read_bytes(), words)


def drawing(data, words):
    """Return an SVG for use in a page, and its own description.

    It is without its own colours and title.
    """
    ET.register_namespace("", SVG)
    svg = ET.fromstring(data)
    told = svg.findtext(f"{{{SVG}}}desc", "").removeprefix(words).strip()
    for parent in list(svg.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("style", "title", "desc"):
                parent.remove(child)
    for name in ("aria-labelledby", "aria-describedby"):
        svg.attrib.pop(name, None)
    svg.attrib |= {"role": "img", "aria-label": words}
    return ET.tostring(svg, encoding="unicode"), told


def drawing_colours():
    """Return the rules that colour the drawings, light and dark."""
    rules = ""
    for name, properties in runpy.run_path(DRAWINGS)["COLOURS"].items():
        rules += f".picture .{name} {{"
        for key, (light, dark) in properties.items():
            same = light == dark  # perhaps "none", which is no colour
            rules += f" {key}: {light};"  # for older browsers, too
            rules += "" if same else f" {key}: light-dark({light}, {dark});"
        rules += " }\n"
    return rules
