"""The page and the notebook as a reader sees them, in a real browser."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest
from helpers import needed

from tools import page as maker

sync_api = needed("playwright.sync_api", "tests/browser.txt")
axe = needed("axe_playwright_python", "tests/browser.txt")

pytestmark = pytest.mark.slow

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
AXE = Path(axe.__file__).with_name("axe.min.js")
WIDTHS = {390: 844, 1280: 800, 1920: 1080}
VIEWS = [(width, scheme) for width in WIDTHS for scheme in ("light", "dark")]
VIEWS.remove((1920, "dark"))  # beside 1280 it has nothing but the margin
DRAWN = "document.querySelectorAll('figure.chart:not(.drawn)').length === 0"
# What a chart consists of, without its axes and legends.
MARKS = """svg => [...svg.querySelectorAll('.role-mark:not(.mark-group)')]
    .flatMap(group => [...group.querySelectorAll('path, text, line, rect')])
    .filter(mark => { const box = mark.getBoundingClientRect();
                      return box.width + box.height > 0; }).length"""

# A picture with a text of its own is one thing, whatever it consists of.
EMPTY = (
    "document.querySelectorAll('.live svg').forEach(s => s.replaceChildren())"
)
# An element's name and classes, and those of all it lies in.
KIND = """const known = new Map([[null, '']]);
    const kind = box => {
        if (!known.has(box)) known.set(box, kind(box.parentElement) + (
            box.tagName === 'SECTION' ? ''
            : box.tagName + box.getAttribute('class')));
        return known.get(box);
    };"""
# Leaves of the page's blocks only those that show a kind of element for the
# first time.
THIN = f"""() => {{
    {KIND}
    const kinds = new Set(), known_blocks = [];
    const blocks = 'section > :not(section):not(.head)';
    for (const block of document.querySelectorAll(blocks)) {{
        const before = kinds.size;
        for (const element of [block, ...block.querySelectorAll('*')])
            if (element.checkVisibility()) kinds.add(kind(element));
        if (kinds.size === before) known_blocks.push(block);
    }}
    known_blocks.forEach(block => block.remove());
    return kinds.size;
}}"""
# Leaves three of what is of one kind and looks the same: enough for contrast.
THIN_ROWS = f"""() => {{
    {KIND}
    const seen = {{}};
    const known_well = [...document.body.querySelectorAll('*')].filter(e => {{
        if (e.children.length || !e.checkVisibility()) return false;
        const style = getComputedStyle(e);
        const look = [kind(e), style.color, style.backgroundColor,
            style.opacity, style.fontSize, style.fontWeight];
        return (seen[look] = (seen[look] || 0) + 1) > 3;
    }});
    known_well.forEach(element => element.remove());
}}"""
# The spans of coloured code are two thirds of all elements; axe asks of them
# nothing but their contrast.
NO_COLOURS = """document.querySelectorAll('pre, pre code').forEach(box => {
    const plain = e => e.getAttributeNames().every(name => name === 'class');
    if ([...box.querySelectorAll('*')].every(plain))
        box.textContent = box.textContent;
})"""
BROKEN = """[...document.images].filter(
    image => image.src && image.complete && !image.naturalWidth
).map(image => image.outerHTML.slice(0, 200))"""


@pytest.fixture(scope="module")
def browser():
    """One Chromium for all tests."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if not program:
        pytest.skip(f"a browser: none of {', '.join(PROGRAMS)} is here")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(built):
    """The page of the stored notebook, as a browser names it."""
    return built.as_uri()


@pytest.fixture(scope="module")
def charts():
    """How many charts the notebook has."""
    cells = nbformat.read(maker.NOTEBOOK, as_version=4).cells
    outputs = [out for cell in cells for out in cell.get("outputs", [])]
    kinds = [kind for out in outputs for kind in out.get("data", {})]
    return sum(kind.startswith(maker.CHART) for kind in kinds)


@contextlib.contextmanager
def visit(browser, address, width=1280, scheme="light", **options):
    """Open a page offline; `troubles` collects all that goes wrong."""
    context = browser.new_context(
        viewport={"width": width, "height": WIDTHS[width]},
        color_scheme=scheme,
        offline=True,
        **options,
    )
    context.set_default_timeout(120_000)  # the machine may be busy
    page = context.new_page()
    page.troubles = []

    def told(message):
        if message.type == "error":
            page.troubles.append(f"console: {message.text}")

    def asked(request):
        if not request.url.startswith(("file:", "data:", "blob:")):
            page.troubles.append(f"asked for {request.url}")

    page.on("console", told)
    page.on("pageerror", lambda error: page.troubles.append(str(error)))
    page.on("request", asked)
    page.on("requestfailed", lambda r: page.troubles.append(f"no {r.url}"))
    page.goto(address)
    try:
        yield page
    finally:
        context.close()


def draw_all(page):
    """Scroll past every chart, as a reader does, until all are live."""
    for figure in page.query_selector_all("figure.chart"):
        figure.scroll_into_view_if_needed()
    page.wait_for_function(DRAWN)


@pytest.fixture(scope="module", params=VIEWS, ids=lambda view: f"{view}")
def read(request, browser, address):
    """The page read from top to bottom, in each width and scheme."""
    with visit(browser, address, *request.param) as page:
        draw_all(page)
        yield page


@pytest.fixture(scope="module")
def desk(browser, address):
    """The page on a laptop, for what one does with it."""
    with visit(browser, address) as page:
        yield page


def ground(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


# In all widths and both schemes


def test_nothing_fails_and_nothing_is_asked_for(read):
    assert read.troubles == []


def test_every_chart_is_live_and_none_is_empty(read, charts):
    drawings = read.query_selector_all("figure.chart .live svg")
    assert len(drawings) == charts
    for drawing in drawings:
        size = drawing.bounding_box()
        assert size["width"] > 100 < size["height"]
        assert drawing.evaluate(MARKS) > 0
        assert drawing.get_attribute("role") == "img"
        assert len(drawing.get_attribute("aria-label")) > 20


def test_every_picture_is_loaded(read):
    assert read.evaluate(BROKEN) == []


def test_only_boxes_scroll_sideways_never_the_page(read):
    beyond = "document.documentElement.scrollWidth - innerWidth"
    assert read.evaluate(beyond) <= 0


def test_what_scrolls_can_be_reached_with_the_keyboard(read):
    boxes = """[...document.querySelectorAll('main .scroll')].filter(
        box => box.scrollWidth > box.clientWidth && box.tabIndex
            && box.checkVisibility())"""
    assert read.evaluate(f"{boxes}.length") == 0


def test_every_link_inside_has_its_target(read):
    missing = """[...document.querySelectorAll('a[href^="#"]')].filter(
        link => link.hash !== '#top'
            && !document.getElementById(decodeURI(link.hash.slice(1))))"""
    assert read.evaluate(f"{missing}.map(link => link.hash)") == []


def test_the_grounds_follow_the_readers_scheme(read):
    dark = read.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    channels = [int(n) for n in re.findall(r"\d+", ground(read))]
    assert max(channels) < 60 if dark else min(channels) > 230


CONTRAST = "{runOnly: ['color-contrast']}"
ALL_ELSE = "{rules: {'color-contrast': {enabled: false}}}"


def axe_on(page, options):
    """What axe finds amiss: the rules' names with the elements."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate(f"axe.run({options})")
    assert found["passes"]
    return [
        (rule["id"], [(n["target"], n["failureSummary"]) for n in nodes[:3]])
        for rule in found["violations"]
        if (nodes := rule["nodes"])
    ]


def test_axe_finds_nothing_on_any_kind_of_element(read, request):
    """WCAG 2 A and AA and the best practices. Last: the page is thinned.

    A scheme changes colours alone, so in the dark contrast alone is asked
    for; and all else at 1280 below, of the whole page, beside which 1920 has
    nothing but the margin.
    """
    read.evaluate(EMPTY)
    assert read.evaluate(THIN) > 50
    width, scheme = request.node.callspec.params["read"]
    if scheme == "light" and width < 1280:
        assert axe_on(read, ALL_ELSE) == []
    read.evaluate(THIN_ROWS)
    assert axe_on(read, CONTRAST) == []


# What a reader does


def test_charts_are_pictures_first_and_live_when_near(browser, address):
    """The program that draws runs after the first paint, when needed."""
    with visit(browser, address) as page:
        page.wait_for_function(
            "performance.getEntriesByName('first-contentful-paint').length"
        )
        assert page.evaluate("'vegaEmbed' in window") is False
        picture = page.query_selector("figure.chart img")
        assert picture.is_visible()
        picture.scroll_into_view_if_needed()
        page.wait_for_selector("figure.chart.drawn")
        assert not picture.is_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_without_scripts_all_can_be_read(browser, address, width):
    with visit(browser, address, width, java_script_enabled=False) as page:
        assert page.is_visible("nav a")
        assert page.is_visible("figure.chart img")
        assert page.is_visible("h1")
        heading = page.locator("#close")  # far down, and nothing lies on it
        heading.scroll_into_view_if_needed()
        sync_api.expect(heading).to_be_in_viewport()
        heading.click(trial=True, timeout=5000)


def test_a_wide_formula_is_read_from_its_beginning(browser, address):
    """It scrolls; what lies left of its box nobody could reach."""
    with visit(browser, address, 390) as page:
        page.set_viewport_size({"width": 320, "height": 640})
        formulas = page.query_selector_all(".maths")
        left = "box => box.getBoundingClientRect().left"
        wider = 0
        for formula in formulas:
            first = formula.query_selector("math")
            assert first.evaluate(left) >= formula.evaluate(left) - 1
            wider += formula.evaluate("b => b.scrollWidth > b.clientWidth")
        assert wider


def test_a_wide_chart_fits_its_room_when_that_gets_less(browser, address):
    with visit(browser, address, 1920) as page:
        figure = page.query_selector("figure.chart.wide")
        figure.scroll_into_view_if_needed()
        page.wait_for_selector("figure.chart.wide.drawn")
        drawn = (
            "f => f.querySelector('.live svg').getBoundingClientRect().width"
        )
        before = figure.evaluate(drawn)
        page.set_viewport_size({"width": 1300, "height": 900})
        page.wait_for_function(
            f"f => ({drawn})(f) <= f.clientWidth", arg=figure
        )
        assert figure.evaluate(drawn) < before


@pytest.mark.parametrize("width", [320, 360])
def test_on_a_small_telephone_the_page_is_as_wide_as_it(
    browser, address, width
):
    with visit(browser, address, 390) as page:
        page.set_viewport_size({"width": width, "height": 640})
        wide = "document.documentElement.scrollWidth"
        assert page.evaluate(wide) == width


def test_the_contents_follow_the_reader(desk):
    heads = "section:has(> .head + :not(section)) > .head > h3"
    listed = [
        heading
        for heading in desk.query_selector_all(heads)
        if heading.inner_text() != "Exercises"
    ]
    for heading in listed[3:-1:6]:
        heading.evaluate("heading => heading.scrollIntoView()")
        desk.wait_for_selector(
            f'nav a[href="#{heading.get_attribute("id")}"][aria-current]'
        )
        entry = desk.query_selector("nav a[aria-current]")
        box = entry.bounding_box()
        assert 0 <= box["y"] <= WIDTHS[1280]
    assert len(desk.query_selector_all("[aria-current]")) == 1


def test_among_exercises_the_contents_show_their_section(desk):
    name = "3-4-embeddings-and-softmax-exercises"
    desk.locator(f'[id="{name}"]').evaluate("it => it.scrollIntoView()")
    desk.wait_for_selector(
        'nav a[href="#3-4-embeddings-and-softmax"][aria-current]'
    )
    assert len(desk.query_selector_all("[aria-current]")) == 1


def test_the_contents_open_on_a_telephone(browser, address):
    with visit(browser, address, 390) as page:
        assert not page.is_visible("nav a")
        page.click(".opener")
        assert page.get_attribute(".opener", "aria-expanded") == "true"
        entry = page.query_selector("nav ol ol a")
        entry.click()
        assert not page.is_visible("nav a")
        name = entry.get_attribute("href")[1:]
        heading = page.locator(f'[id="{name}"]')
        sync_api.expect(heading).to_be_in_viewport()
        below = page.query_selector(".side").bounding_box()["height"]
        assert heading.bounding_box()["y"] >= below
        page.click(".opener")
        page.keyboard.press("Escape")
        assert not page.is_visible("nav a")


def test_the_contents_open_where_the_reader_is(browser, address):
    """And close when the focus goes on to the text."""
    with visit(browser, address, 390) as page:
        heading = page.locator("#the-training-loop")
        heading.evaluate("heading => heading.scrollIntoView()")
        page.wait_for_selector(
            'nav a[href="#the-training-loop"][aria-current]', state="attached"
        )
        page.click(".opener")
        entry = page.locator("nav a[aria-current]")
        sync_api.expect(entry).to_be_in_viewport()
        page.locator("nav a").last.focus()
        for _ in range(9):
            page.keyboard.press("Tab")
            if not page.is_visible("nav a"):
                break
        assert not page.is_visible("nav a")
        assert page.evaluate("!!document.activeElement.closest('main')")


def test_a_telephone_that_is_turned_gets_its_charts_anew(browser, address):
    room = """[...document.querySelectorAll('figure.chart.drawn .live svg')]
        .map(svg => svg.getBoundingClientRect().width)"""
    with visit(browser, address, 390) as page:
        page.set_viewport_size({"width": 640, "height": 390})
        first = page.locator("figure.chart").first
        first.scroll_into_view_if_needed()
        page.wait_for_selector("figure.chart.drawn")
        [before, *_] = page.evaluate(room)
        page.set_viewport_size({"width": 390, "height": 640})
        page.wait_for_function(
            f"{room}[0] < Math.min({before}, document.body.clientWidth)"
        )


def test_a_chart_is_told_once(browser, address):
    """By its picture; its switches are not a part of that."""
    with visit(browser, address) as page:
        chart = page.locator("figure.chart").first
        chart.scroll_into_view_if_needed()
        page.wait_for_selector("figure.chart.drawn")
        live = page.locator("figure.chart.drawn .live").first
        assert live.get_attribute("role") is None
        assert live.get_attribute("aria-label") is None
        picture = live.locator("svg").first
        assert picture.get_attribute("role") == "img"
        assert len(picture.get_attribute("aria-label")) > 40


REFUSE = "() => { navigator.clipboard.writeText = () => Promise.reject(); }"


def test_code_is_copied(browser, address):
    """Through the clipboard, or by hand where a browser refuses it."""
    with visit(browser, address) as page:
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        blocks = page.query_selector_all(".cell > .code")[2:19:3]
        for number, block in enumerate(blocks):
            if number == len(blocks) // 2:
                page.evaluate(REFUSE)
            button = block.query_selector("button")
            button.focus()
            page.keyboard.press("Enter")
            page.wait_for_function(
                "button => button.textContent === 'Copied'", arg=button
            )
            text = page.evaluate("navigator.clipboard.readText()")
            assert text == block.query_selector("code").text_content()
            assert button.evaluate("button => document.activeElement===button")


INK = "figure => getComputedStyle(figure.querySelector('svg text')).fill"


def test_the_theme_is_chosen_and_remembered(browser, address):
    with visit(browser, address) as page:
        figure = page.query_selector("figure.chart")
        figure.scroll_into_view_if_needed()
        page.wait_for_selector("figure.drawn")
        before, ink = ground(page), figure.evaluate(INK)
        page.check(".theme [value=dark]")
        page.wait_for_function(
            f"([figure, ink]) => ({INK})(figure) !== ink", arg=[figure, ink]
        )
        assert ground(page) != before
        for _ in range(20):  # a loaded machine stores a moment later
            page.reload()
            if ground(page) != before:
                break
            page.wait_for_timeout(250)
        assert ground(page) != before
        assert page.is_checked(".theme [value=dark]")
        page.check(".theme [value=auto]")
        assert ground(page) == before
        assert page.troubles == []


def test_folded_code_opens(desk):
    fold = desk.query_selector("main .cell details")
    assert not fold.query_selector("pre").is_visible()
    fold.query_selector("summary").focus()
    desk.keyboard.press("Enter")
    assert fold.query_selector("pre").is_visible()


def test_a_charts_switch_changes_the_chart(desk):
    """Each list of choices redraws its chart, and a new theme keeps them.

    And who comes back to an earlier choice finds what was there.
    """
    draw_all(desk)
    lists = desk.query_selector_all("figure.chart select")
    assert lists
    for choice in lists:
        figure = choice.evaluate_handle("list => list.closest('figure')")
        look = "figure => figure.querySelector('svg').innerHTML"
        chosen = choice.evaluate("list => list.value")
        values = choice.evaluate("list => [...list.options].map(o => o.value)")
        other = next(value for value in values if value != chosen)
        marks = f"figure => ({MARKS})(figure.querySelector('svg'))"
        drawn = figure.evaluate(marks)
        for value in (other, chosen, other):
            before = figure.evaluate(look)
            choice.select_option(value)
            desk.wait_for_function(
                f"([figure, before]) => ({look})(figure) !== before",
                arg=[figure, before],
            )
            if value == chosen:
                assert figure.evaluate(marks) == drawn
            cut = figure.evaluate(
                """figure => { const svg = figure.querySelector('svg');
                const room = svg.getBoundingClientRect();
                return [...svg.querySelectorAll('text')].filter(text => {
                    const box = text.getBoundingClientRect();
                    return box.left < room.left - 1 ||
                        box.right > room.right + 1;
                }).map(text => text.textContent); }"""
            )
            assert cut == []
        assert choice.evaluate("list => list.labels[0].textContent").strip()
    wanted = [choice.evaluate("list => list.value") for choice in lists]
    desk.check(".theme [value=dark]")
    values = "[...document.querySelectorAll('figure select')].map(s=>s.value)"
    desk.wait_for_function("list => !list.isConnected", arg=lists[-1])
    assert desk.evaluate(values) == wanted
    desk.check(".theme [value=auto]")


def test_axe_finds_nothing_on_the_whole_page(browser, address):
    """But for contrast, which takes axe long, and is the same everywhere."""
    with visit(browser, address) as page:
        draw_all(page)
        page.evaluate(EMPTY)
        page.evaluate(NO_COLOURS)
        assert axe_on(page, ALL_ELSE) == []


def test_notes_stand_in_the_margin_only_where_there_is_one(browser, address):
    places = {}
    with visit(browser, address) as page:
        for width, height in WIDTHS.items():
            page.set_viewport_size({"width": width, "height": height})
            text = page.query_selector("section > p:not(.note)")
            note = page.query_selector(".note")
            text, note = text.bounding_box(), note.bounding_box()
            places[width] = note["x"] > text["x"] + text["width"]
            assert note["x"] + note["width"] <= width
    assert places == {390: False, 1280: False, 1920: True}


def test_on_paper_charts_are_pictures_and_all_is_open(browser, address):
    with visit(browser, address, scheme="dark") as page:
        draw_all(page)
        page.emulate_media(media="print")
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert min(map(int, re.findall(r"\d+", ground(page)))) > 230
        for picture in page.query_selector_all("figure.chart img"):
            assert picture.is_visible()
        assert page.query_selector_all("figure.chart .live:visible") == []
        assert not page.query_selector_all("details:not([open])")
        assert not page.is_visible(".side")
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert not page.query_selector_all("details[open]")


# The notebook in JupyterLab

QUIET = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
    },
}
# An error of JupyterLab itself, or of a kernel that this test does not need.
HARMLESS = re.compile(r"favicon|kernel|WebSocket|lsp|source map", re.I)

LIVE = ".jp-OutputArea .vega-embed canvas.marks"
BLANK = """.filter(canvas => {
    const pixels = canvas.getContext('2d').getImageData(
        0, 0, canvas.width, canvas.height).data;
    return new Set(new Uint32Array(pixels.buffer)).size < 10;
}).length"""


def shows_something(cell):
    """Whether a cell is prose or has more to show than printed text."""
    outputs = cell.get("outputs", [])
    return cell.cell_type == "markdown" or any("data" in o for o in outputs)


@pytest.fixture
def lab(tmp_path):
    """The address of a JupyterLab in an empty folder with the notebook."""
    for name in ("config/labconfig", "run", "data", "books", "home"):
        (tmp_path / name).mkdir(parents=True)
    settings = tmp_path / "config/labconfig/default_setting_overrides.json"
    settings.write_text(json.dumps(QUIET))
    cells = [nbformat.v4.new_markdown_cell("nothing")]
    blank = nbformat.v4.new_notebook(cells=cells)
    nbformat.write(blank, tmp_path / "books" / "blank.ipynb")
    book = nbformat.read(maker.NOTEBOOK, as_version=4)
    cells = book.cells
    code = [cell.id for cell in cells if not shows_something(cell)]
    for name, some in {"book": code[::10], "shown": []}.items():
        book.cells = [c for c in cells if shows_something(c) or c.id in some]
        nbformat.write(book, tmp_path / "books" / f"{name}.ipynb")
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "run"),
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "data"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "data"),
        "HOME": str(tmp_path / "home"),
    }
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser"),
        *("--port=0", "--ServerApp.ip=127.0.0.1", "--allow-root"),
        *("--IdentityProvider.token=", "--ServerApp.password="),
        f"--ServerApp.root_dir={tmp_path / 'books'}",
    ]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log
        )
    try:
        yield wait_for_server(server, tmp_path)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:  # it waits for its kernels at times
            server.kill()
            server.wait()


def wait_for_server(server, folder):
    """Return the address of a server that answers."""
    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        for file in (folder / "run").glob("jpserver-*.json"):
            with contextlib.suppress(OSError, ValueError):
                url = json.loads(file.read_text())["url"]
                with urllib.request.urlopen(f"{url}api", timeout=5):
                    return url
        time.sleep(0.1)
    pytest.fail((folder / "log").read_text())


@pytest.mark.parametrize(
    "place, name", [("lab/tree", "book"), ("notebooks", "shown")]
)
def test_jupyter_shows_the_notebook_with_all_charts(
    browser, lab, charts, place, name
):
    """JupyterLab and Notebook, offline: live charts and unbroken images.

    Of the code, which is most of it, one of the two will do, and there every
    tenth cell that shows no more than itself; of the links one will do as
    well: both show text by the same program. What goes wrong with a blank
    notebook as well is Jupyter's own.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    # A thousand cells at once, and the other tests beside them: 45 seconds
    # were measured on two busy cores. No time is lost where it takes less.
    context.set_default_timeout(240_000)
    page, troubles = context.new_page(), []

    def fence(route):
        if route.request.url.startswith(lab):
            route.continue_()
        else:
            troubles.append(f"asked for {route.request.url}")
            route.abort()

    def told(message):
        if message.type == "error" and not HARMLESS.search(message.text):
            troubles.append(message.text)

    context.route(re.compile(r"^https?:"), fence)
    page.on("console", told)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(f"{lab}{place}/blank.ipynb")
    page.wait_for_selector(".jp-MarkdownOutput")
    page.wait_for_timeout(1000)
    own = set(troubles)
    page.goto(f"{lab}{place}/{name}.ipynb")
    page.wait_for_function(
        f"document.querySelectorAll('{LIVE}').length === {charts}"
    )
    # The text may come after the charts.
    page.wait_for_selector(".jp-MarkdownOutput h1", state="attached")
    blank = page.evaluate(f"[...document.querySelectorAll('{LIVE}')]{BLANK}")
    assert blank == 0
    assert page.evaluate(BROKEN) == []
    titles = "The levers, measured", "How good is it? BLEU"
    for title in titles if place == "notebooks" else ():
        link = page.locator(".jp-MarkdownOutput a:visible", has_text=title)
        link.first.click()
        heading = page.locator(".jp-MarkdownOutput h3", has_text=title).first
        sync_api.expect(heading).to_be_in_viewport()
    assert set(troubles) <= own
    assert not any(trouble.startswith("asked for") for trouble in troubles)
    context.close()
