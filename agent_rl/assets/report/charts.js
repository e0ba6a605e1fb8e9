"use strict";
// Draws the charts that Python described, in the page's own colours, one a frame so that the page answers meanwhile.

const DARK = { "#0072B2": "#4aa5e6", "#D55E00": "#f07c2e", "#009E73": "#2fc299" }; // the darker ones, lifted

function dark() { return matchMedia("(prefers-color-scheme: dark)").matches && !matchMedia("print").matches; }

function variable(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const hiddenFigures = new Set(); // "chart figure", switched off in a legend

// One entry a figure: the colours of several runs are explained once, at the top of the page.
function legend(chart) {
  const figures = new Map(chart.data.filter((trace) => trace.meta).map((trace) => [trace.meta, trace]));
  const lines = chart.data[0].type === "scatter";
  if (lines && figures.size < 2) return null;
  const oneColour = new Set(chart.data.map((trace) => trace.name)).size === figures.size;
  return element("div", { class: "key" }, ...[...figures].map(([label, trace]) => {
    const colour = lines ? (oneColour ? (dark() && DARK[trace.line.color]) || trace.line.color : "currentColor") : trace.marker.color;
    const sample = element("span", { class: lines ? "dash" : "swatch" });
    if (lines) sample.style.borderTop = `2px ${{ solid: "solid", dot: "dotted" }[trace.line.dash] ?? "dashed"} ${colour}`;
    else sample.style.background = colour;
    const id = `${chart.id} ${label}`;
    const button = element("button", { type: "button", title: "show or hide" }, sample, label);
    button.setAttribute("aria-pressed", !hiddenFigures.has(id));
    button.addEventListener("click", () => {
      if (!hiddenFigures.delete(id)) hiddenFigures.add(id);
      button.setAttribute("aria-pressed", !hiddenFigures.has(id));
      draw(chart);
    });
    return button;
  }));
}

function themed(chart) {
  const line = variable("--line"), muted = variable("--muted");
  const axis = {
    gridcolor: line, linecolor: line, zerolinecolor: line, automargin: true, ticks: "outside", ticklen: 3,
    tickcolor: line, exponentformat: "e",
  };
  const layout = structuredClone(chart.layout);
  for (const name of ["xaxis", "yaxis"]) {
    layout[name] = { ...axis, ...layout[name] };
    layout[name].title = { ...layout[name].title, font: { size: 12, color: muted }, standoff: 8 };
    if (layout[name].type === "log") Object.assign(layout[name], { dtick: 1, minor: { ticks: "outside", ticklen: 2 } });
  }
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 52, r: 12, t: 8, b: 40 },
    font: { family: "system-ui, sans-serif", size: 12, color: variable("--ink") },
    hovermode: chart.data[0].type === "heatmap" ? "closest" : "x unified",
    hoverlabel: { bgcolor: variable("--panel"), bordercolor: line, font: { size: 12 } },
    showlegend: false,
  });
  const data = structuredClone(chart.data);
  for (const trace of data) {
    if (dark() && trace.line?.color) trace.line.color = DARK[trace.line.color] ?? trace.line.color;
    if (hiddenFigures.has(`${chart.id} ${trace.meta}`)) trace.visible = false;
    if (trace.type === "scatter") trace.hovertemplate = "%{y:.4~g}";
    if (trace.colorbar) Object.assign(trace.colorbar, { thickness: 10, outlinewidth: 0, tickfont: { size: 11 } });
  }
  return [data, layout];
}

// Dragging zooms and a double click takes it back; a tool bar would only cover the legend.
const PLOT = { responsive: true, displayModeBar: false };

function draw(chart) {
  const plot = document.getElementById(`plot-${chart.id}`);
  if (plot) Plotly.react(plot, ...themed(chart), PLOT);
}

function sections(charts) {
  const found = new Map();
  for (const chart of charts) found.set(chart.section, [...(found.get(chart.section) ?? []), chart]);
  return found;
}

function anchor(section) { return section.toLowerCase().replaceAll(" ", "-"); }

// Places of the charts; a chart whose place is there keeps it, so that a live page does not jump.
function place(root, charts) {
  const wanted = charts.map((chart) => [chart.id, ...new Set(chart.data.map((trace) => trace.name))].join()).join() + dark();
  if (root.dataset.charts === wanted) return;
  root.dataset.charts = wanted;
  root.replaceChildren();
  for (const [section, members] of sections(charts)) {
    const grid = element("div", { class: "charts" });
    for (const chart of members) {
      const caption = element("figcaption", {}, chart.title, element("p", { class: "note" }, chart.note), legend(chart));
      grid.append(element("figure", { class: `chart panel is-${chart.data[0].type}` }, caption,
        element("div", { class: "plot", id: `plot-${chart.id}`, role: "img", ariaLabel: chart.title })));
    }
    root.append(element("section", { id: anchor(section) }, element("h2", {}, section), grid));
  }
}

let drawing = 0;

function drawAll(root, charts) {
  place(root, charts);
  const mine = ++drawing, left = [...charts];
  const next = () => {
    if (mine !== drawing) return; // newer charts have come
    const chart = left.shift();
    if (chart) { draw(chart); setTimeout(next); } else document.body.dataset.drawn = charts.length;
  };
  next();
}

let redraw = () => {};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());
matchMedia("print").addEventListener("change", () => redraw());

function navigation(nav, charts, more) {
  const names = [...sections(charts).keys(), ...more];
  nav.replaceChildren(...names.map((name) => element("a", { href: `#${anchor(name)}` }, name)));
}
