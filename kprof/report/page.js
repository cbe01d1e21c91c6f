"use strict";
(() => {
  const figures = [...document.querySelectorAll("figure[data-figure]")];
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const themes = {
    light: { ink: "#1d1f24", line: "#dfe2e8", paper: "#ffffff" },
    dark: { ink: "#e6e8ec", line: "#343943", paper: "#16181d" },
  };
  const drawn = new Set();
  let loading = null;

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

  function themed(layout, theme) {
    const colours = { ...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" };
    colours.font = { ...layout.font, color: theme.ink, family: getComputedStyle(document.body).fontFamily };
    colours.hoverlabel = { ...layout.hoverlabel, bgcolor: theme.paper, bordercolor: theme.ink, font: { color: theme.ink } };
    for (const axis of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      const lines = { gridcolor: theme.line, zerolinecolor: theme.line, linecolor: theme.line };
      colours[axis] = { ...lines, ...layout[axis] };
    }
    return colours;
  }

  function draw(figure, theme) {
    const plot = figure.querySelector(".plot");
    const { data, layout } = JSON.parse(document.getElementById(figure.dataset.figure).textContent);
    if (!drawn.has(figure)) plot.replaceChildren();
    drawn.add(figure);
    const options = { responsive: true, displayModeBar: false };
    return window.Plotly.react(plot, data, themed(layout, theme), options);
  }

  const theme = () => (dark.matches ? themes.dark : themes.light);

  async function show(figure) {
    try {
      await (loading ??= unpack());
      await draw(figure, theme());
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

  dark.addEventListener("change", () => drawn.forEach((figure) => draw(figure, theme())));
  addEventListener("beforeprint", () => window.Plotly && figures.forEach((figure) => draw(figure, themes.light)));
  addEventListener("afterprint", () => drawn.forEach((figure) => draw(figure, theme())));
})();
