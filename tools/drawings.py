"""Draw the book's pictures: the code below makes five files in images/.

python tools/drawings.py          write them
python tools/drawings.py --check  fail where one is not what the code makes

Colours are classes alone. A picture in a file is styled for light ground;
a page that takes it in drops its style, and makes rules of `COLOURS`.
"""

import argparse
import html
import inspect
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

IMAGES = Path(__file__).resolve().parent.parent / "images"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif"
MONO = "ui-monospace, Consolas, 'Noto Sans Mono', monospace"


def paint(light, dark, edge_light, edge_dark):
    """The colours of a filled shape with an edge, light and dark."""
    return {"fill": (light, dark), "stroke": (edge_light, edge_dark)}


def stroke(light, dark):
    """The colours of a line, which fills nothing."""
    return {"fill": ("none", "none"), "stroke": (light, dark)}


# Class -> property -> (light, dark): tints of Okabe and Ito's hues.
TEXTS = {
    "d-ink": {"fill": ("#1f2328", "#e9ecef")},
    "d-pale": {"fill": ("#4b5560", "#bac3cd")},
    "d-alert": {"fill": ("#a33a00", "#ffb488")},
}
SHAPES = {
    "d-paper": paint("#ffffff", "#1b1f24", "#c3cbd4", "#4a545f"),
    "d-group": paint("#f3f5f8", "#252b32", "#b4bdc7", "#5a6572"),
    "d-attention": paint("#d6eaf8", "#15405c", "#0072b2", "#5ab4e8"),
    "d-cross": paint("#f6e1ec", "#522c44", "#a4527f", "#d58ab3"),
    "d-feed": paint("#cfeee3", "#0f4738", "#007a59", "#3dbf95"),
    "d-norm": paint("#f7f2bf", "#4a450f", "#8c8200", "#d6c94a"),
    "d-embed": paint("#fce8c4", "#553c08", "#a87300", "#e0a22b"),
    "d-output": paint("#fbdccc", "#5b2c12", "#b84f00", "#ee8a4a"),
    "d-token": paint("#ffffff", "#2f363e", "#66717c", "#9aa5b1"),
    "d-future": paint("#e3e6ea", "#3b4149", "#7d8791", "#8b96a2"),
}
LINES = {
    "d-line": stroke("#57606a", "#a9b3bd"),
    "d-main": stroke("#0072b2", "#56b4e9"),
    "d-memory": stroke("#a4527f", "#d58ab3"),
}
SHADE = {"d-shade": {"fill": ("#0072b2", "#56b4e9")}}
COLOURS = TEXTS | SHAPES | LINES | SHADE


def css(classes=COLOURS, dark=False):
    """The rules that give the classes their light or dark colours."""
    rules = []
    for name in classes:
        values = ";".join(f"{k}:{v[dark]}" for k, v in COLOURS[name].items())
        rules.append(f".{name}{{{values}}}")
    return "\n".join(rules)


# A piece of a text: `code`, _{subscript}, ^{superscript}, or plain.
PIECE = re.compile(r"`([^`]+)`|_\{([^}]+)\}|\^\{([^}]+)\}|([^`_^]+|[_^])")


def text_width(words, size, bold=False):
    """The width of a text in a wide font: few readers have a wider one."""
    width = 0.0
    for code, low, high, plain in PIECE.findall(words):
        width += 0.61 * (size - 1) * len(code)
        for letter in low + high + plain:
            narrow, wide = letter in " iljtfrI.,:;'()|", letter in "mwMW"
            unit = 0.39 if narrow else 0.95 if wide else 0.64
            width += unit * size * (1.08 if bold else 1)
    return width


def number(value):
    """A coordinate in few characters."""
    return f"{value:.1f}".removesuffix(".0")


class Box(NamedTuple):
    """A drawn rectangle, to which arrows can be tied."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self):
        return self.left + self.width

    @property
    def bottom(self):
        return self.top + self.height

    @property
    def cx(self):
        return self.left + self.width / 2

    @property
    def cy(self):
        return self.top + self.height / 2


class Drawing:
    """A picture: shapes and words on a card, in the order drawn."""

    def __init__(self, width, height, draw):
        self.name, self.size, self.parts = draw.__name__, (width, height), []
        self.box(width / 2, 1, width - 2, height - 2, "d-paper", radius=14)

    def add(self, tag, kind, inner=None, **attributes):
        """Append an element of the class `kind`."""
        start = f'<{tag} class="{kind}"'
        for key, value in attributes.items():
            value = number(value) if isinstance(value, float) else value
            start += f' {key.replace("_", "-")}="{value}"'
        end = "/>" if inner is None else f">{inner}</{tag}>"
        self.parts.append(start + end)

    def text(self, x, y, words, kind="d-ink", size=15, at="middle", **more):
        """Write words; `code`, _{low} and ^{high} are understood."""
        inner, shift = "", 0
        long = text_width(words, size, "font_weight" in more)
        start = x - long * {"start": 0, "middle": 0.5, "end": 1}[at]
        room = 8 <= start <= self.size[0] - long - 8
        if not room and "transform" not in more:
            raise ValueError(f"{self.name}: {words!r} leaves the card")
        for code, low, high, plain in PIECE.findall(words):
            want = size * (0.25 if low else -0.35 if high else 0)
            marks = f' dy="{number(want - shift)}"' if want != shift else ""
            shift = want
            if code:
                marks += f' font-family="{MONO}" font-size="{size - 1}"'
            elif low or high:
                marks += f' font-size="{max(12, round(0.75 * size))}"'
            piece = html.escape(code or low or high or plain, quote=False)
            inner += f"<tspan{marks}>{piece}</tspan>" if marks else piece
        place = dict(x=float(x), y=float(y), font_size=size)
        self.add("text", kind, inner, **place, text_anchor=at, **more)

    def box(self, cx, top, width, height, kind, *lines, radius=8, **more):
        """A rounded box, its first line strong, the others pale."""
        box = Box(cx - width / 2, top, width, height)
        edge = dict(x=box.left, y=float(top), width=width, height=height)
        self.add("rect", kind, **edge, rx=radius, **more)
        y = box.cy - 9 * (len(lines) - 1) + 5
        for place, words in enumerate(lines):
            size, bold = (14, False) if place else (15, "`" not in words)
            if text_width(words, size, bold) > width - 8:
                raise ValueError(f"{self.name}: {words!r} is too wide")
            weight = {"font_weight": 600} if bold else {}
            tone = "d-pale" if place else "d-ink"
            self.text(box.cx, y + 18 * place, words, tone, size, **weight)
        return box

    def heading(self, x, y, words, size=16, at="middle", **more):
        """Strong words."""
        self.text(x, y, words, size=size, at=at, font_weight=600, **more)

    def note(self, x, y, words, at="middle", **more):
        """Pale words, a little smaller."""
        self.text(x, y, words, "d-pale", 14, at, **more)

    def path(self, *points, kind="d-line", head=True, **more):
        """A line with round corners from point to point, and its arrow."""
        steps = rounded(points)
        if head:  # two strokes back from the tip
            (x, y), (a, b) = points[-1], towards(points[-1], points[-2], 7)
            side, turn = 0.6 * (y - b), 0.6 * (a - x)
            tips = (a + side, b + turn), (a - side, b - turn)
            steps += f"M{spot(tips[0])}L{spot((x, y))}L{spot(tips[1])}"
        self.add("path", kind, d=steps, **more)

    def outline(self, kind, *corners):
        """A closed shape with round corners."""
        middle = towards(corners[-1], corners[0], math.inf)
        steps = rounded([middle, *corners, middle]) + "Z"
        self.add("path", kind, d=steps)

    def down(self, x, top, bottom, shape="", **more):
        """An arrow straight down with a shape beside it."""
        self.path((x, top), (x, bottom - 2), **more)
        if shape:
            middle = (top + bottom) / 2 + 4
            self.note(x + 10, middle, shape, "start")

    def cell(self, x, y, size, kind, words="", masked=False, **more):
        """A square of a matrix; a stroke across it marks a hidden one."""
        place = dict(x=float(x), y=float(y), width=size, height=size)
        self.add("rect", kind, **place, rx=2, stroke_width=1)
        if masked:
            self.path((x, y + size), (x + size, y), head=False, stroke_width=1)
        if words:
            self.text(x + size / 2, y + size / 2 + 5, words, size=14, **more)

    def group(self, name, close=""):
        """Open a named group, where wanted after the last one's end."""
        self.parts.append(f'{close}<g id="{self.name}-{name}">')

    def svg(self):
        """The finished file."""
        name, (width, height) = self.name, self.size
        title, *words = told(name)
        body = "\n".join(self.parts)
        used = [c for c in COLOURS if f'class="{c}"' in body]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
            f'height="{height}" viewBox="0 0 {width} {height}" role="img" '
            f'aria-labelledby="{name}-title {name}-desc" '
            f'font-family="{SANS}" stroke-width="1.5" '
            'stroke-linecap="round" stroke-linejoin="round">\n'
            f'<title id="{name}-title">{title}</title>\n'
            f'<desc id="{name}-desc">{" ".join(words)}</desc>\n'
            f"<style>\n{css(used)}\n</style>\n{body}\n</svg>\n"
        )


def spot(point):
    """A point as a path writes it."""
    return " ".join(map(number, point))


def towards(start, end, length):
    """The point `length` from the start, or half the way if nearer."""
    share = min(0.5, length / math.dist(start, end))
    return tuple(a + share * (b - a) for a, b in zip(start, end))


def rounded(points):
    """The steps of a line through the points, its corners round."""
    steps = f"M{spot(points[0])}"
    for before, here, after in zip(points, points[1:], points[2:]):
        steps += f"L{spot(towards(here, before, 8))}"
        steps += f"Q{spot(here)} {spot(towards(here, after, 8))}"
    return steps + f"L{spot(points[-1])}"


# Each picture: its docstring's title, alternative text, and description.
# ---- 1


def sublayer(d, cx, start, top, side, kind, *lines):
    """A Residual: a sub-layer, the way round it, the sum and the norm."""
    d.box(cx, top, 260, 122, "d-paper", stroke_dasharray="4 4")
    at = "start" if side > 0 else "end"
    d.note(cx - side * 120, top + 18, "`Residual`", at)
    inner = d.box(cx, top + 26, 192, 46, kind, *lines)
    norm = d.box(cx, top + 84, 192, 28, "d-norm", "add x, LayerNorm")
    d.path((cx, start), (cx, inner.top - 2))
    d.path((cx, inner.bottom), (cx, norm.top - 2))
    way, end = cx + side * 113, cx + side * 98
    d.path((cx, top + 12), (way, top + 12), (way, norm.cy), (end, norm.cy))
    return inner, norm.bottom


def stack(d, cx, layer, *parts):
    """A Stack: N layers, drawn as cards one behind the other."""
    top, side, start = 242, 1 if cx > 360 else -1, 212
    height = 38 + 132 * len(parts)
    for shift in (10, 5, 0):
        card = d.box(cx + shift, top + shift, 284, height, "d-group")
    d.text(cx - 130, top + 22, "`Stack` of N", size=14, at="start")
    d.text(cx + 130, top + 22, f"`{layer}`", size=14, at="end")
    inner = []
    for place, part in enumerate(parts):
        here = top + 34 + 132 * place
        box, start = sublayer(d, cx, start, here, side, *part)
        inner.append(box)
    return card, inner, start


def embedded(d, cx, words, name, size):
    """From token ids to the input of a stack: embedding and position."""
    d.heading(cx, 36, words, 15)
    d.note(cx, 57, f"`{name} (B, {size})`")
    d.down(cx, 64, 84)
    d.text(cx, 106, f"`{name}_embedding`")
    d.note(cx, 125, "the row of each word, times √D")
    d.down(cx, 138, 166, f"`(B, {size}, D)`")
    lines = "`PositionalEncoding`", "adds sines and cosines"
    d.box(cx, 166, 232, 46, "d-token", *lines)
    d.note(cx + 10, 231, f"`(B, {size}, D)`", "start")


def legend(d, x, top):
    """What the letters say."""
    d.heading(x, top, "Each `Residual`", 15, "start")
    d.note(x, top + 21, "`norm(x + drop(sublayer(x)))`", "start")
    letters = {
        "B": "sentences in a batch",
        "S, T": "words of source and target",
        "D": "`d_model`, the width of a state",
        "V": "words in the vocabulary",
        "N": "layers in each stack",
    }
    for line, (letter, words) in enumerate(letters.items()):
        y = top + 54 + 21 * line
        d.text(x, y, f"`{letter}`", size=14, at="start")
        d.note(x + 44, y, words, "start")


def transformer():
    """The Transformer, from words to probabilities.

    The whole model from top to bottom: a stack of encoder layers at the
    left, a stack of decoder layers at the right, and one shared matrix that
    embeds both sides and gives the logits.

    Source words src (B, S) and target words tgt (B, T), shifted right, each
    become rows of the shared matrix (V, D), times the root of D;
    PositionalEncoding adds sines and cosines. The source (B, S, D) passes
    through a Stack of N EncoderLayers. Each has two Residual boxes, one
    round MultiHeadAttention, in which every source word looks at the whole
    source, and one round FeedForward, which treats each position alone. In
    each box a way leads round the sub-layer to a sum, and LayerNorm
    follows. The result is the memory (B, S, D). The target (B, T, D) passes
    through a Stack of N DecoderLayers. Each has three Residual boxes:
    self-attention to the target so far, cross-attention to the memory,
    which an arrow brings from the encoder, and FeedForward. The states
    (B, T, D) times the same matrix, transposed, are the logits (B, T, V),
    and softmax makes them the probabilities of the next word. The matrix is
    drawn as one frame that touches all three of its uses.
    """
    d = Drawing(720, 884, transformer)
    left, right, foot, look = 162, 486, 710, "`MultiHeadAttention`"
    top = [(20, 138), (20, 84), (700, 84), (700, foot + 52)]
    below = [(344, foot + 52), (344, foot), (656, foot), (656, 138)]
    d.outline("d-embed", *top, *below)
    turned = {"transform": "rotate(90 678 420)"}
    words = "one shared matrix (V, D), used three times"
    d.heading(678, 425, words, 15, **turned)
    embedded(d, left, "source words", "src", "S")
    embedded(d, right, "target words, shifted right", "tgt", "T")
    feed = ("d-feed", "`FeedForward`", "each position alone")
    first = ("d-attention", look, "self: the whole source")
    card, _, end = stack(d, left, "EncoderLayer", first, feed)
    d.path((left, end), (left, card.bottom + 34))
    lines = "memory `(B, S, D)`", "read by every decoder layer"
    memory = d.box(left, card.bottom + 36, 232, 46, "d-cross", *lines)
    first = ("d-attention", look, "self: the target so far")
    cross = ("d-cross", look, "cross: the memory")
    _, inner, end = stack(d, right, "DecoderLayer", first, cross, feed)
    goal = inner[1]
    way = (memory.right, memory.cy), (329, memory.cy), (329, goal.cy)
    d.path(*way, (goal.left - 2, goal.cy), kind="d-memory", stroke_width=2.5)
    d.down(right, end, foot)
    d.note(right + 10, foot - 9, "`(B, T, D)`", "start")
    d.text(right, foot + 22, "`logits`")
    d.note(right, foot + 41, "states times the matrix, transposed")
    d.down(right, foot + 52, foot + 82, "`(B, T, V)`")
    soft = d.box(right, foot + 82, 232, 30, "d-output", "softmax")
    d.down(right, soft.bottom, soft.bottom + 22)
    d.text(right, soft.bottom + 38, "probabilities of the next word")
    legend(d, 36, 704)
    return d


# ---- 2


SCORES = (9, 2, 6, 4), (3, 10, 1, 7), (8, 5, 9, 2), (1, 9, 4, 8)


def icon(d, x, y, masked, softmax):
    """A small (T, S) matrix: scores, masked scores or weights."""
    for t, row in enumerate(SCORES):
        total = sum(math.exp(0.3 * v) for v in row[: t + 1])
        for s, score in enumerate(row):
            left, top, hidden = x + 10 * s, y + 10 * t, masked and s > t
            kind = "d-future" if hidden else "d-token"
            d.cell(left, top, 10, kind, masked=hidden)
            shade = math.exp(0.3 * score) / total if softmax else score / 14
            if not hidden:
                place = dict(x=left + 1.0, y=top + 1.0, width=8, height=8)
                d.add("rect", "d-shade", **place, fill_opacity=f"{shade:.2f}")


def step(d, box, words, below, picture):
    """The words of one step, and a small matrix at its right."""
    x = box.cx - 24 if picture else box.cx
    d.heading(x, box.cy - 4, words, 15)
    d.note(x, box.cy + 14, below)
    if picture:
        icon(d, box.right - 49, box.top + 5, *picture)


def one_attention(d, left, rows):
    """Scaled dot-product attention, step by step."""
    q, k, v = left + 64, left + 178, left + 292
    for cx, name, size in ((q, "Q", "T"), (k, "K", "S"), (v, "V", "S")):
        lines = f"`{name}`", f"`(B, H, {size}, K)`"
        d.box(cx, rows[0], 106, 50, "d-token", *lines)
        d.down(cx, rows[0] + 50, rows[6 if cx == v else 1])
    steps = [
        ("d-attention", "Q K^{T}", "queries by keys", (False, False)),
        ("d-norm", "÷ √d_{k}", "d_{k} = K, a head’s width", None),
        ("d-future", "mask", "False: hidden", (True, False)),
        ("d-attention", "softmax", "rows sum to 1", (True, True)),
        ("d-token", "dropout", "optional, in training", None),
    ]
    middle = (q + k) / 2
    for place, (kind, *rest) in enumerate(steps, 1):
        dashed = {"stroke_dasharray": "4 4"} if place == 5 else {}
        box = d.box(middle, rows[place], 220, 50, kind, **dashed)
        step(d, box, *rest)
        shape = "`(B, H, T, S)`" if place in (1, 4) else ""
        d.down(middle, box.bottom, rows[place + 1], shape)
    lines = "weights · V", "weighted means of the values"
    d.box(k, rows[6], 334, 50, "d-attention", *lines)
    d.down(k, rows[6] + 50, rows[7] - 6)
    d.text(k, rows[7] + 12, "`(B, H, T, K)`", size=14)


def many_heads(d, left, rows):
    """Multi-head attention: project, split, attend, merge, project."""
    middle = left + 178
    roles = ("Q", "query", "T"), ("K", "key", "S"), ("V", "value", "S")
    for place, (name, role, size) in enumerate(roles):
        cx = left + 64 + 114 * place
        shape, cut = f"`(B, {size}, D)`", f"`(B, H, {size}, K)`"
        d.box(cx, rows[0], 106, 50, "d-token", f"`{role}`", shape)
        d.box(cx, rows[1], 106, 50, "d-feed", f"`W_{name}`", shape)
        d.box(cx, rows[2], 106, 50, "d-token", "`split`", cut)
        for row in range(3):
            d.down(cx, rows[row] + 50, rows[row + 1])
    lines = "`attention`", "in H heads side by side,", "one mask for all"
    for shift in (4, 0, -4):
        card = middle + shift, rows[3] + shift + 4, 326, 110, "d-attention"
        d.box(*card, *(lines if shift == -4 else ()))
    d.down(middle, rows[3] + 118, rows[5], "`(B, H, T, K)`")
    lines = "merge the heads", "`transpose`, `flatten`"
    d.box(middle, rows[5], 220, 50, "d-token", *lines)
    d.down(middle, rows[5] + 50, rows[6], "`(B, T, D)`")
    d.box(middle, rows[6], 220, 50, "d-feed", "`W_O`", "mixes the heads")
    d.down(middle, rows[6] + 50, rows[7] - 6)
    d.text(middle, rows[7] + 12, "`(B, T, D)`", size=14)


def attention():
    """Scaled dot-product attention and multi-head attention.

    Two flow charts, from top to bottom: at the left the function attention,
    step by step; at the right the class MultiHeadAttention, which calls it
    in H heads at once.

    Left: Q (B, H, T, K) and K (B, H, S, K) are multiplied to scores
    (B, H, T, S), divided by the root of d_k; where the mask is False the
    score is hidden; softmax makes each row sum to 1, and what is hidden
    weigh 0; in training, dropout may follow. These weights times
    V (B, H, S, K) are the output (B, H, T, K). Small matrices of four by
    four cells show scores, masked scores and weights. Right: query
    (B, T, D), key and value (B, S, D) are multiplied by W_Q, W_K and W_V.
    split cuts each into H heads: (B, H, T, K), and (B, H, S, K) twice. All
    heads attend side by side under one mask. transpose and flatten merge
    them to (B, T, D), and W_O mixes the heads to the output (B, T, D).
    """
    d = Drawing(760, 664, attention)
    names = {
        "Scaled dot-product attention": "function `attention`",
        "Multi-head attention": "class `MultiHeadAttention`",
    }
    for cx, (words, name) in zip((194, 566), names.items()):
        d.box(cx, 16, 356, 632, "d-group")
        d.heading(cx, 44, words)
        d.note(cx, 65, name)
    rows = range(84, 650, 76)
    one_attention(d, 16, rows)
    many_heads(d, 388, rows)
    return d


# ---- 3


def branch(d, x, side, first):
    """The sub-layer's branch, off the path of x and back to the sum."""
    boxes = [("d-attention", "sub-layer", "attention or network")]
    boxes += [("d-token", "dropout", "in training only")]
    if first:
        boxes.insert(0, ("d-norm", "LayerNorm", "of the branch only"))
    top = 312 - 76 * (len(boxes) - 1)
    way = [(x, 136), (side, 136)]
    for kind, *lines in boxes:
        d.path(*way, (side, top - 2))
        box = d.box(side, top, 168, 50, kind, *lines)
        way, top = [(side, box.bottom)], top + 76
    d.path(*way, (side, 402), (x + 17, 402))


def order(d, left, first, words, code, *notes):
    """A residual sub-layer; `first`: the norm comes before it."""
    d.box(left + 174, 16, 348, 668, "d-group")
    d.heading(left + 174, 46, words)
    d.note(left + 174, 68, code)
    x, thick = left + 88, {"kind": "d-main", "stroke_width": 4}
    d.text(x, 104, "`x (B, T, D)`", size=14)
    d.path((x, 114), (x, 386), head=False, **thick)
    branch(d, x, left + 252, first)
    d.add("circle", "d-token", cx=x, cy=402, r=14)
    d.path((x - 7, 402), (x + 7, 402), head=False)
    d.path((x, 395), (x, 409), head=False)
    start = 418
    if not first:
        d.path((x, start), (x, 440), **thick)
        start = 496
        d.box(x, 444, 140, 50, "d-norm", "LayerNorm", "after each sum")
    d.path((x, start), (x, 508), head=False, **thick)
    d.path((x, 522), (x, 543), head=False, stroke_dasharray="1 9", **thick)
    d.note(left + 172, 537, "further sub-layers", "start")
    start = 556
    if first:
        d.path((x, start), (x, 574), **thick)
        d.box(x, 578, 140, 50, "d-norm", "LayerNorm", "at the very end")
        start = 630
    d.path((x, start), (x, 668), **thick)
    for y, line in zip((464, 482, 598, 616), notes):
        d.note(left + 172, y, line, "start")


def residual():
    """A residual sub-layer, post-norm and pre-norm.

    The same sub-layer in both orders. Post-norm puts LayerNorm on the path
    of x, after each sum; pre-norm puts it on the branch, and the path of x
    stays clear down to one norm at the end of the stack.

    In both, x (B, T, D) runs down a thick line. A branch leaves it, passes
    the sub-layer (attention or network) and dropout, which works in
    training only, and is added to x again. Left, post-norm, the paper's
    order, norm(x + drop(sublayer(x))): the thick line passes through
    LayerNorm after the sum, so x itself is normalized in every sub-layer;
    the stack adds no norm of its own. Right, pre-norm, norm_first=True,
    x + drop(sublayer(norm(x))): LayerNorm is the first box of the branch.
    From one end to the other nothing but sums stands on the thick line;
    only after the N layers of the stack, one final LayerNorm follows.
    """
    d = Drawing(744, 700, residual)
    post, pre = (
        "`norm(x + drop(sublayer(x)))`",
        "`x + drop(sublayer(norm(x)))`",
    )
    notes = ["x itself is normalized,", "in every sub-layer"]
    notes += ["the stack adds no", "norm of its own"]
    order(d, 16, False, "Post-norm, as in the paper", post, *notes)
    notes = ["nothing but sums", "on the path of x"]
    notes += ["one for the stack,", "after its N layers"]
    order(d, 380, True, "Pre-norm, `norm_first=True`", pre, *notes)
    return d


# ---- 4


WORDS = ["<s>", "two", "dogs", "play", "</s>"]
COLUMNS = [300 + 112 * t for t in range(4)]
RAIL = {"kind": "d-memory", "stroke_width": 2.5}


def chips(d, top, name, words, kind="d-token"):
    """A row of words, one for each place."""
    d.note(246, top + 21, name, "end")
    for x, word in zip(COLUMNS, words):
        d.box(x, top, 84, 32, kind, f"`{word}`")


def encoded(d, middle, top):
    """The source at the left, its encoder and the memory."""
    source = d.box(104, middle - 25, 136, 50, "d-token")
    d.text(104, middle - 4, "`zwei Hunde`")
    d.text(104, middle + 15, "`spielen </s>`")
    d.down(104, source.bottom, top)
    box = d.box(104, top, 136, 68, "d-attention", "encoder", "one call")
    d.note(211, box.cy - 9, "memory")
    return box


def sight(d, x, y, place, future):
    """Four cells: which words the decoder sees at a place."""
    for t in range(4 if future else place + 1):
        kind = "d-attention" if t <= place else "d-future"
        d.cell(x - 32 + 16 * t, y, 16, kind, masked=t > place)


def training(d, top):
    """All places at once, each with the true words before it."""
    d.heading(36, top + 30, "Training: all places at once", at="start")
    chips(d, top + 62, "`read`", WORDS[:4])
    box = encoded(d, top + 78, top + 126)
    bar = d.box(468, box.top, 436, 68, "d-cross")
    d.heading(468, bar.top + 24, "decoder, one call", 15)
    d.path((box.right, box.cy), (bar.left - 2, box.cy), **RAIL)
    for place, x in enumerate(COLUMNS):
        d.down(x, top + 94, bar.top)
        sight(d, x, bar.top + 38, place, True)
        loss = bar.bottom + 26, 84, 28, "d-output", "loss"
        loss = d.box(x, *loss, radius=14)
        d.down(x, bar.bottom, loss.top)
        d.path((x, loss.bottom + 24), (x, loss.bottom + 2))
    chips(d, bar.bottom + 78, "`labels`", WORDS[1:])
    y = bar.bottom + 138
    d.note(
        258, y, "`read` is `tgt[:, :-1]`, `labels` is `tgt[:, 1:]`", "start"
    )
    for line, words in enumerate(("seen", "hidden by the mask")):
        y = bar.bottom + 30 + 26 * line
        kind = ("d-attention", "d-future")[line]
        d.cell(36, y, 16, kind, masked=line == 1)
        d.note(60, y + 13, words, "start")


def inference(d, top):
    """One word after the other, each fed back."""
    d.heading(36, top + 30, "Inference: one word after the other", at="start")
    box = encoded(d, top + 92, top + 140)
    chips(d, top + 76, "reads", WORDS[:4])
    for place, x in enumerate(COLUMNS):
        d.note(x, top + 64, f"step {place + 1}")
        start = x - 70 if place else box.right
        d.path((start, box.cy), (x - 44, box.cy), **RAIL)
        d.down(x, top + 108, box.top)
        d.box(x, box.top, 84, 68, "d-cross")
        d.heading(x, box.top + 24, "decoder", 14)
        sight(d, x, box.top + 38, place, False)
        d.down(x, box.bottom, box.bottom + 26)
    chips(d, box.bottom + 26, "writes", WORDS[1:], "d-output")
    for x in COLUMNS[:3]:
        low, high = box.bottom + 42, top + 92
        d.path((x + 42, low), (x + 56, low), (x + 56, high), (x + 68, high))
    words = "what it writes, it reads next; `</s>` ends the text"
    d.note(258, box.bottom + 86, words, "start")


def training_and_inference():
    """What the decoder reads in training and in inference.

    Two panels with the same four columns. In training the decoder reads all
    true words at once and is asked for the next at each place; in inference
    it takes four steps and reads what it wrote itself.

    The source is “zwei Hunde spielen”, then the end symbol; the encoder
    reads it in one call and gives the memory to the decoder. Training: the
    decoder reads the start symbol, two, dogs, play, in one call. At the
    first place it sees one word, at the second two, and so on; the words to
    come are hidden by the mask. Its outputs are compared, in the loss, with
    the labels: two, dogs, play, end symbol, the same row one place to the
    left. Inference: in step 1 the decoder reads the start symbol and writes
    “two”; an arrow leads from this word to what step 2 reads, and so on; it
    writes “dogs”, “play”, and in step 4 the end symbol, which ends the text.
    """
    d = Drawing(720, 712, training_and_inference)
    d.box(360, 16, 688, 348, "d-group")
    training(d, 16)
    d.box(360, 380, 688, 316, "d-group")
    inference(d, 380)
    return d


# ---- 5


T, D, H, K = 3, 6, 2, 3
ROWS = [[D * t + i for i in range(D)] for t in range(T)]  # (T, D)
PIECES = [[row[K * h : K * h + K] for h in range(H)] for row in ROWS]
HEADS = [[PIECES[t][h] for t in range(T)] for h in range(H)]  # (H, T, K)
RUN = [piece for pieces in PIECES for piece in pieces]  # reading order
WRONG = [RUN[:T], RUN[T:]]  # what view(H, T, K) makes


def numbers(d, x, y, row, prime=""):
    """A row of cells in the colours of their heads."""
    for place, n in enumerate(row):
        kind = ("d-attention", "d-embed")[n % D // K]
        weight = {"font_weight": 700} if n % D >= K else {}
        d.cell(x + 28 * place, y, 28, kind, f"{n}{prime}", **weight)


def block(d, x, y, rows, head, prime=""):
    """One head, (T, K), under its name."""
    d.note(x + 42, y - 6, f"head {head}")
    for t, row in enumerate(rows):
        numbers(d, x, y + 28 * t, row, prime)


def forms(d, middle, prime, name):
    """The three forms of a tensor, side by side."""
    d.group(f"{name}-rows")
    for t, row in enumerate(ROWS):
        numbers(d, 84, middle - 42 + 28 * t, row, prime)
    d.group(f"{name}-pieces", "</g>")
    for t, pieces in enumerate(PIECES):
        for h, piece in enumerate(pieces):
            numbers(d, 342 + 94 * h, middle - 52 + 38 * t, piece, prime)
    d.group(f"{name}-heads", "</g>")
    for h, rows in enumerate(HEADS):
        block(d, 624, middle - 89 + 114 * h, rows, h, prime)
    d.parts.append("</g>")
    for t, word in enumerate(WORDS[1:4]):
        d.text(74, middle - 23 + 28 * t, word, size=14, at="end")


def labels(d, arrow, heights, names):
    """The words of two arrows, and the shapes of the three forms."""
    shapes = "`(B, T, D)`", "`(B, T, H, K)`", "`(B, H, T, K)`"
    for x, y, shape in zip((168, 431, 666), heights, shapes):
        d.text(x, y, shape, size=14)
    for x, name in zip((297, 566), names):
        d.text(x, arrow - 12, f"`{name}`", size=14)


def mistake(d, top):
    """What view(B, H, T, K) does: it mixes words and heads."""
    d.box(370, top, 708, 152, "d-group")
    words = "Wrong: `x.view(B, H, T, K)`"
    d.text(36, top + 36, words, "d-alert", 16, "start", font_weight=600)
    lines = ["It fills the heads in reading order.", "So head 0 gets both"]
    lines[1] += " halves of “two”,"
    for place, words in enumerate((*lines, "and nothing of “play”.")):
        d.note(36, top + 68 + 21 * place, words, "start")
    d.group("wrong")
    for h, rows in enumerate(WRONG):
        block(d, 430 + 190 * h, top + 46, rows, h)
    d.parts.append("</g>")
    for place, piece in enumerate(RUN):
        x, y = 420 + 190 * (place // T), top + 65 + 28 * (place % T)
        d.text(x, y, WORDS[1 + piece[0] // D], size=14, at="end")


def heads():
    """How a tensor is split into heads and merged again.

    The numbers 0 to 17, as three words of width 6, are cut into two heads of
    width 3, pass attention, and are put together again. A panel below shows
    how view without transpose mixes the heads up.

    The rows “two” (0 to 5), “dogs” (6 to 11) and “play” (12 to 17) form
    (B, T, D). unflatten cuts each row in two: (B, T, H, K). transpose brings
    the heads to the front: (B, H, T, K); head 0 holds 0 1 2, 6 7 8,
    12 13 14, and head 1 holds 3 4 5, 9 10 11, 15 16 17. attention changes
    the numbers of each head, then transpose and flatten lead back to
    (B, T, H, K) and (B, T, D). Wrong is x.view(B, H, T, K): it fills the
    heads in reading order, so head 0 holds 0 to 8, which is both halves of
    “two”, half of “dogs” and nothing of “play”.
    """
    d = Drawing(740, 804, heads)
    d.heading(36, 50, "Split", at="start")
    forms(d, 164, "", "split")
    labels(d, 164, (110, 100, 49), ("unflatten", "transpose"))
    d.path((260, 164), (334, 164))
    d.path((528, 164), (604, 164))
    d.note(36, 262, "Each word gives K = 3 of its D = 6 numbers", "start")
    d.note(36, 283, "to head 0, and 3 to head 1 (bold).", "start")
    d.down(666, 275, 296)
    d.box(666, 296, 116, 48, "d-attention", "`attention`", "in each head")
    d.down(666, 344, 366)
    d.heading(36, 364, "Merge", at="start")
    d.note(36, 388, "Attention has changed the numbers: 1 is 1′ now.", "start")
    forms(d, 478, "′", "merge")
    labels(d, 478, (544, 554, 609), ("flatten", "transpose"))
    d.path((604, 478), (528, 478))
    d.path((334, 478), (260, 478))
    mistake(d, 636)
    return d


# ---- the files


DRAWN = (transformer, attention, residual, training_and_inference, heads)
PICTURES = {draw.__name__: draw for draw in DRAWN}


def told(name):
    """A picture's title, alternative text and further description."""
    parts = inspect.getdoc(PICTURES[name]).split("\n\n")
    return [" ".join(part.split()) for part in parts]


ALTERNATIVES = {name: told(name)[1] for name in PICTURES}


def differences():
    """The pictures whose files are not what the code makes."""
    stale = []
    for name, draw in PICTURES.items():
        path = IMAGES / f"{name}.svg"
        made = draw().svg().encode()
        if not path.is_file() or path.read_bytes() != made:
            stale.append(name)
    return stale


def main():
    """Write the pictures, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        if stale := differences():
            sys.exit("Run tools/drawings.py: changed " + ", ".join(stale))
        return
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_bytes(draw().svg().encode())


if __name__ == "__main__":
    main()
