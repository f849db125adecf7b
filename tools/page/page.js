// What the page does beyond showing text: the contents that follow the
// reader, light and dark, copying, live charts, and printing.
"use strict";
(() => {
  const root = document.documentElement;
  const one = (selector, within = document) => within.querySelector(selector);
  const all = (selector, within = document) => [
    ...within.querySelectorAll(selector),
  ];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () =>
    root.dataset.theme === "dark" ||
    (root.dataset.theme !== "light" && dark.matches);
  // The charts' palette (Okabe and Ito), brighter for dark ground.
  const NIGHT = ["#4ba7ea", "#f2803f", "#2fbf94", "#dd9cc3", "#f0b43c", "#8fd0f5"];

  // Contents: the entry of the innermost section under a line near the top.
  const side = one(".side");
  const opener = one(".opener");
  const entries = new Map(
    all("nav a").map((link) => [link.hash.slice(1), link]),
  );
  const sections = all("section[data-for]");
  const under = new Set();

  function follow(changes) {
    for (const { target, isIntersecting } of changes) {
      if (isIntersecting) under.add(target);
      else under.delete(target);
    }
    const link = sections
      .filter((section) => under.has(section))
      .map((section) => entries.get(section.dataset.for)) // exercises: none
      .filter(Boolean)
      .pop();
    one('nav [aria-current="true"]')?.removeAttribute("aria-current");
    all("nav .open").forEach((item) => item.classList.remove("open"));
    one(".here").textContent = link ? link.textContent : "";
    if (!link) return;
    link.setAttribute("aria-current", "true");
    for (let item = link; item.tagName !== "NAV"; item = item.parentElement) {
      if (item.tagName === "LI") item.classList.add("open");
    }
    const box = side.getBoundingClientRect();
    const place = link.getBoundingClientRect();
    if (place.bottom > box.bottom - 48) {
      side.scrollTop += place.bottom - box.bottom + box.height / 3;
    } else if (place.top < box.top + 48) {
      side.scrollTop += place.top - box.top - box.height / 3;
    }
  }
  const line = { rootMargin: "-15% 0px -85% 0px" };
  const spy = new IntersectionObserver(follow, line);
  sections.forEach((section) => spy.observe(section));

  function open(yes) {
    side.classList.toggle("open", yes);
    opener.setAttribute("aria-expanded", yes);
    const link = yes && one('nav [aria-current="true"]');
    if (!link) return;
    const box = one(".drawer");
    const place = box.getBoundingClientRect();
    box.scrollTop +=
      link.getBoundingClientRect().top - place.top - place.height / 3;
  }
  opener.addEventListener("click", () => {
    open(!side.classList.contains("open"));
  });
  side.addEventListener("click", (event) => {
    if (event.target.closest("nav a, .book")) open(false);
  });
  side.addEventListener("focusout", ({ relatedTarget }) => {
    if (relatedTarget && !side.contains(relatedTarget)) open(false);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && side.classList.contains("open")) {
      open(false);
      opener.focus();
    }
  });

  // A box that scrolls can be reached with the keyboard, others need not be.
  function measure(box) {
    const wide = box.scrollWidth > box.clientWidth;
    const marks = { tabindex: 0, role: "group", "aria-label": "Scrolls sideways" };
    for (const [name, value] of Object.entries(marks)) {
      if (wide) box.setAttribute(name, value);
      else box.removeAttribute(name);
    }
  }
  const sizes = new ResizeObserver((changes) => {
    changes.forEach((change) => measure(change.target));
  });
  all(".scroll").forEach((box) => sizes.observe(box));
  document.fonts.ready.then(() => all(".maths").forEach(measure));

  // Copying: the clipboard may be refused to a file, the old way never is.
  function copyByHand(text) {
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  async function copy(button) {
    const text = one("code", button.parentElement).textContent;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      copyByHand(text);
      button.focus();
    }
    button.textContent = one("[role=status]").textContent = "Copied";
    setTimeout(() => {
      button.textContent = "Copy";
      one("[role=status]").textContent = "";
    }, 2000);
  }
  for (const block of all(".code")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", () => copy(button));
    block.append(button);
  }

  // Charts: pictures at first, live when the reader comes near.
  let library = one("#library");
  const drawn = new Map();

  function embed(...parameters) {
    if (library) {
      const script = document.createElement("script");
      script.textContent = `(() => {${library.textContent}})();`;
      document.head.append(script);
      library = null;
    }
    return window.vegaEmbed(...parameters);
  }
  // The charts are stored for light ground: give them the page's own ink.
  function repaint(spec, figure) {
    const { color, borderTopColor: pale, fontFamily } = getComputedStyle(figure);
    const words = { labelColor: color, titleColor: color };
    const own = {
      axis: {
        ...words,
        gridColor: pale,
        domainColor: pale,
        tickColor: pale,
        labelSeparation: 6,
      },
      legend: words,
      header: words,
      title: { color, subtitleColor: color },
      rule: { color },
      text: { color },
      range: isDark() ? { category: NIGHT } : {},
    };
    spec.config ??= {};
    for (const [part, values] of Object.entries(own)) {
      spec.config[part] = { ...spec.config[part], ...values };
    }
    Object.assign(spec.config, {
      aria: false, // the whole is described, not each of its marks
      background: "transparent",
      font: fontFamily,
      padding: { left: 0, right: 0, top: 12, bottom: 12 },
    });
  }
  // On a telephone panels stand one below the other, legends below, and a
  // title takes several lines.
  function fit(spec, natural, room) {
    const grid = spec.columns ? spec : spec.encoding?.facet;
    const columns = Math.min(grid?.columns, spec.concat?.length ?? Infinity);
    if (columns > 1 && natural > 0.9 * room) {
      spec.config.legend.orient = "bottom";
      natural -= 60; // pixels that it took at the side
    }
    if (natural <= room) return;
    if (grid?.columns) {
      grid.columns = Math.max(1, Math.floor((columns * room) / natural));
    } else if (spec.hconcat) {
      spec.vconcat = spec.hconcat;
      delete spec.hconcat;
    } else if ((spec.mark || spec.layer) && !spec.width) {
      spec.width = room;
      spec.autosize = { type: "fit-x", contains: "padding" };
      Object.assign(spec.config.legend, { orient: "bottom", columns: 1 });
    }
    const letters = Math.floor(room / 8);
    const lines = new RegExp(`.{1,${letters}}(?:\\s|$)`, "g");
    if (spec.title?.length > letters) spec.title = spec.title.match(lines);
  }
  async function draw(figure) {
    const before = drawn.get(figure);
    drawn.set(figure, before || {});
    const picture = one("img", figure);
    const box = one(".view", figure);
    const spec = JSON.parse(one("script", figure).textContent);
    for (const chosen of before?.view ? spec.params || [] : []) {
      if (chosen.bind) chosen.value = before.view.signal(chosen.name);
    }
    const natural = picture.width - 2 * (spec.config?.padding ?? 0);
    repaint(spec, figure); // which takes the padding away
    fit(spec, natural, box.clientWidth);
    const place = document.createElement("div");
    place.className = "live";
    box.append(place);
    const result = await embed(place, spec, {
      actions: false,
      renderer: "svg",
      defaultStyle: false,
      tooltip: { theme: "book", disableDefaultStyle: true },
    });
    before?.place?.remove();
    before?.finalize?.();
    for (const name of ["role", "aria-roledescription", "aria-label"]) {
      place.removeAttribute(name); // the picture has them, its switches not
    }
    const svg = one("svg", place);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", picture.alt);
    drawn.set(figure, { ...result, place });
    figure.classList.add("drawn");
    measure(box);
  }
  const near = new IntersectionObserver(
    (changes) => {
      for (const { target, isIntersecting } of changes) {
        if (!isIntersecting) continue;
        near.unobserve(target);
        draw(target);
      }
    },
    { rootMargin: "100% 0px" },
  );
  all("figure.chart").forEach((figure) => near.observe(figure));
  const redraw = () => [...drawn.keys()].forEach(draw);
  let room = one("main").clientWidth;
  let later;
  const resized = new ResizeObserver(([{ target }]) => {
    if (target.clientWidth === room) return;
    room = target.clientWidth;
    clearTimeout(later);
    later = setTimeout(redraw, 200);
  });
  resized.observe(one("main"));

  // Light and dark: the reader's system decides, unless the reader does.
  dark.addEventListener("change", redraw);
  matchMedia("(min-width: 87rem)").addEventListener("change", redraw); // wide ones
  for (const choice of all(".theme input")) {
    choice.checked = choice.value === (root.dataset.theme || "auto");
    choice.addEventListener("change", () => {
      root.dataset.theme = choice.value;
      try {
        localStorage.setItem("line-by-line-theme", choice.value);
      } catch { /* then it is forgotten with the page */ }
      redraw();
    });
  }

  // On paper nothing can be opened.
  addEventListener("beforeprint", () => {
    all("details:not([open])").forEach((fold) => {
      fold.open = true;
      fold.dataset.printed = "";
    });
    all("img[loading]").forEach((image) => image.removeAttribute("loading"));
  });
  addEventListener("afterprint", () => {
    all("[data-printed]").forEach((fold) => {
      fold.open = false;
      delete fold.dataset.printed;
    });
  });
})();
