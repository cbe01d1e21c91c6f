"use strict";
(() => {
  const figures = [...document.querySelectorAll("figure[data-figure]")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const themes = {
    light: { ink: "#1d1f24", line: "#dfe2e8", paper: "#ffffff" },
    dark: { ink: "#e6e8ec", line: "#343943", paper: "#16181d" },
  };
  // The room for figures on a sheet of A4 or Letter, in pixels of CSS.
  const PRINT_WIDTH = 690;
  // Below this width figures have smaller labels; a name in a legend takes so many pixels.
  const NARROW = 560;
  const ROW_OF_LEGEND = 14;
  // A figure out of sight waits no longer for a page that is busy.
  const WAIT_MS = 500;
  const drawn = new Set();

  // Plotly's own script, unpacked and run as an inline script whose hash the page's policy names.
  async function unpack() {
    const packed = atob(document.getElementById("plotly").textContent.trim());
    const bytes = Uint8Array.from(packed, (c) => c.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    if (!window.Plotly) throw new Error("the drawing script did not run");
  }

  // A page is printed no sooner than its load event, which a frame that is being written delays.
  async function unpackBeforeLoad() {
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    // In a sandbox, as of a notebook, the frame's document is out of reach.
    frame.contentDocument?.open();
    try {
      await unpack();
    } finally {
      frame.remove();
    }
  }

  function themed(layout, theme, width) {
    const colours = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    colours.font = { ...layout.font, color: theme.ink, family: getComputedStyle(document.body).fontFamily };
    colours.hoverlabel = { ...layout.hoverlabel, bgcolor: theme.paper, bordercolor: theme.ink, font: { color: theme.ink } };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      const lines = { gridcolor: theme.line, zerolinecolor: theme.line, linecolor: theme.line };
      colours[axis] = { ...lines, ...layout[axis] };
    }
    const room = width ?? document.querySelector("main").clientWidth;
    if (room < NARROW) {
      colours.font.size = 10;
      if (layout.legend) colours.legend = { ...layout.legend, maxheight: ROW_OF_LEGEND * 40 };
      colours.margin = { ...layout.margin, l: Math.min(layout.margin?.l ?? 80, Math.round(0.45 * room)) };
    }
    if (width) colours.width = width;
    return colours;
  }

  function draw(figure, theme, width) {
    const plot = figure.querySelector(".plot");
    const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
    if (!drawn.has(figure)) plot.replaceChildren();
    drawn.add(figure);
    // A legend below the marks has one name in a row where there is no room for two.
    const isNarrow = (width ?? plot.clientWidth) < NARROW && layout.legend?.y < 0;
    plot.style.height = isNarrow ? `calc(var(--height) + ${ROW_OF_LEGEND * data.length}px)` : "";
    const options = { responsive: true, displayModeBar: false };
    return window.Plotly.react(plot, data, themed(layout, theme, width), options);
  }

  const loading = figures.length ? unpackBeforeLoad() : null;
  const theme = () => (dark.matches ? themes.dark : themes.light);

  async function show(figure) {
    try {
      await loading;
      if (!drawn.has(figure)) await draw(figure, theme());
    } catch (error) {
      figure.querySelector(".plot").textContent = `This browser cannot draw the figure: ${error.message}`;
    }
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((entry) => entry.isIntersecting)) {
      watcher.unobserve(entry.target);
      show(entry.target);
    }
  }, { rootMargin: "600px" });
  figures.forEach((figure) => watcher.observe(figure));

  // The others follow one by one while the page is idle, so that none waits for its reader.
  const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
  const drawSoon = () => whenIdle(drawRest, { timeout: WAIT_MS });
  async function drawRest() {
    const next = figures.find((figure) => !drawn.has(figure));
    if (!next) return;
    await show(next);
    if (drawn.has(next)) drawSoon();
  }
  if (figures.length) addEventListener("load", drawSoon);

  dark.addEventListener("change", () => drawn.forEach((figure) => draw(figure, theme())));
  const folds = [...document.querySelectorAll("details")];
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = folds.filter((fold) => !fold.open);
    opened.forEach((fold) => { fold.open = true; });
    if (window.Plotly) figures.forEach((figure) => draw(figure, themes.light, PRINT_WIDTH));
  });
  addEventListener("afterprint", () => {
    opened.forEach((fold) => { fold.open = false; });
    drawn.forEach((figure) => draw(figure, theme()));
  });

  // Tables: a click on a header sorts, words filter, Copy takes the rows with their full names.
  const SCALES = {
    ns: 1, "µs": 1e3, ms: 1e6, s: 1e9, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40,
    k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15,
  };
  function amount(text) {
    const found = text.replaceAll(",", "").match(/(-?[\d.]+)\s*([A-Za-zµ]*)/);
    if (!found) return null;
    const unit = found[2];
    return Number(found[1]) * (SCALES[unit] ?? (unit.length > 1 ? SCALES[unit[0]] : 1) ?? 1);
  }
  const wholeText = (cell) => cell.title || cell.textContent.trim();

  function sortBy(table, header, place) {
    const isNumber = header.classList.contains("right");
    const isDescending = header.ariaSort ? header.ariaSort === "ascending" : isNumber;
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    header.ariaSort = isDescending ? "descending" : "ascending";
    const rows = [...table.tBodies[0].rows].map((row) => {
      const text = wholeText(row.cells[place]);
      return { row, key: isNumber ? amount(text) : text.toLowerCase() };
    });
    const sign = isDescending ? -1 : 1;
    rows.sort((a, b) => {
      if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
      return sign * (a.key < b.key ? -1 : a.key > b.key ? 1 : 0);
    });
    table.tBodies[0].append(...rows.map(({ row }) => row));
  }

  function filterBy(table, all, words) {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    if (all && wanted.length) all.checked = true;
    for (const row of table.tBodies[0].rows) {
      const text = [...row.cells].map(wholeText).join(" ").toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
  }

  async function copy(table, button) {
    const rows = [...table.rows].filter((row) => !row.hidden);
    const cells = rows.map((row) => [...row.cells].filter((cell) => !cell.matches(".bar, thead td")));
    const text = cells.map((row) => row.map(wholeText).join("\t")).join("\n");
    let isDone = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      isDone = false;
    }
    button.textContent = isDone ? "Copied" : "Not allowed to copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }

  const ROWS_TO_FILTER = 8;
  for (const place of document.querySelectorAll(".table")) {
    const table = place.querySelector("table");
    const caption = place.querySelector(".caption").textContent;
    for (const [column, header] of [...table.tHead.rows[0].cells].entries()) {
      if (header.tagName !== "TH" || table.tBodies[0].rows.length < 2) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = header.textContent;
      button.addEventListener("click", () => sortBy(table, header, column));
      header.replaceChildren(button);
    }
    const tools = document.createElement("div");
    tools.className = "tools";
    if (table.tBodies[0].rows.length >= ROWS_TO_FILTER) {
      const words = document.createElement("input");
      words.type = "search";
      words.placeholder = "Filter";
      words.setAttribute("aria-label", `Filter: ${caption}`);
      const all = place.querySelector(":scope > input");
      words.addEventListener("input", () => filterBy(table, all, words.value));
      tools.append(words);
    }
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", () => copy(table, button));
    tools.append(button);
    place.querySelector(".head").append(tools);
  }
})();
