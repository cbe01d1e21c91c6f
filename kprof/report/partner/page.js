"use strict";
(() => {
  const root = document.documentElement;
  const make = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });

  // Everything below is for comfort: the page says the same without it.
  const tools = make("div", "");
  tools.className = "tools";
  const theme = make("button", "Light or dark");
  const isDark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; });
  const unfold = make("button", "Unfold all");
  unfold.addEventListener("click", () => {
    const all = [...document.querySelectorAll("details")];
    const open = all.some((one) => !one.open);
    all.forEach((one) => { one.open = open; });
    unfold.textContent = open ? "Fold all" : "Unfold all";
  });
  const print = make("button", "Print");
  print.addEventListener("click", () => window.print());
  for (const button of [theme, unfold, print]) { button.type = "button"; tools.append(button); }
  document.querySelector("header").append(tools);

  // Long tables show their first rows, and the rest on demand.
  for (const table of document.querySelectorAll("table.long")) {
    const rows = [...table.tBodies[0].rows].slice(12);
    rows.forEach((row) => { row.hidden = true; });
    const more = make("button", `Show all ${table.tBodies[0].rows.length} rows`);
    more.type = "button";
    more.className = "more";
    const show = () => { rows.forEach((row) => { row.hidden = false; }); more.remove(); };
    more.addEventListener("click", show);
    addEventListener("beforeprint", show);
    table.parentElement.after(more);
  }

  // A click on a header sorts by its column: numbers by size, with their units.
  const sizes = { ns: 1, "µs": 1e3, ms: 1e6, s: 1e9, k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };
  const valueOf = (cell) => {
    const found = cell.textContent.replaceAll(",", "").match(/(-?\d[\d.]*(?:e[+-]?\d+)?)\s*(ns|µs|ms|s\b|[kMGTP](?=[A-Z/]))?/);
    return found ? Number(found[1]) * (sizes[found[2]] ?? 1) : -Infinity;
  };
  for (const table of document.querySelectorAll("table")) {
    const body = table.tBodies[0];
    const isTotal = (row) => row.cells[0].textContent.trim() === "All";
    if (body.rows.length < 8) continue;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (head.tagName !== "TH" || !head.textContent.trim()) return;
      const button = make("button", head.textContent);
      button.type = "button";
      head.replaceChildren(button);
      const isNumber = head.classList.contains("right");
      button.addEventListener("click", () => {
        const falls = head.getAttribute("aria-sort") ? head.getAttribute("aria-sort") === "ascending" : isNumber;
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", falls ? "descending" : "ascending");
        const compare = isNumber
          ? (a, b) => valueOf(a.cells[column]) - valueOf(b.cells[column])
          : (a, b) => a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en");
        const rows = [...body.rows].sort((a, b) =>
          isTotal(a) - isTotal(b) || (falls ? compare(b, a) : compare(a, b)));
        body.append(...rows);
      });
    });
  }

  // Cards: in the order of the report, or by what they save.
  for (const cards of document.querySelectorAll(".cards")) {
    const original = [...cards.children];
    if (original.length < 3) continue;
    const row = make("p", "");
    row.className = "sorter";
    const label = make("label", "Order: ");
    const select = make("select", "");
    select.append(make("option", "most promising first"), make("option", "largest saving first"));
    label.append(select);
    row.append(label);
    cards.before(row);
    select.addEventListener("change", () => {
      const bySaving = (a, b) => b.dataset.saving - a.dataset.saving;
      cards.append(...(select.selectedIndex ? [...original].sort(bySaving) : original));
    });
  }

  // What a mark stands for, under the pointer.
  const tip = make("div", "");
  tip.id = "tip";
  tip.hidden = true;
  tip.setAttribute("aria-hidden", "true");
  document.body.append(tip);
  const texts = new Map();
  for (const title of document.querySelectorAll("figure svg title")) {
    texts.set(title.parentElement, title.textContent);
    title.remove();
  }
  addEventListener("pointermove", (event) => {
    const text = texts.get(event.target);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - width - 8)}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  }, { passive: true });

  // On paper everything is unfolded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((one) => { one.open = true; });
  });
  addEventListener("afterprint", () => folded.forEach((one) => { one.open = false; }));
})();
