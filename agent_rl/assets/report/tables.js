"use strict";
// The summary of each run and the tables.

function figure(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size < 1e-2 ? value.toExponential(1) : size < 1000 ? String(Number(value.toPrecision(3))) : value.toFixed(0);
}

// The names of the runs; of several, with the colour that each has in the charts.
function heading(root, runs, colours) {
  root.replaceChildren(...runs.map((run, position) => element("span", {}, runs.length > 1
    ? element("span", { class: "swatch", style: `background:${colours[position % colours.length]}` }) : null, run.name)));
}

function summary(root, runs, colours) {
  root.replaceChildren(...runs.map((run, position) => {
    const items = run.summary.flatMap(([label, value]) =>
      [element("div", {}, element("dt", {}, label), element("dd", {}, value))]);
    const swatch = runs.length > 1
      ? element("span", { class: "swatch", style: `background:${colours[position % colours.length]}` }) : null;
    const heading = element("h3", {}, swatch, run.name, element("span", { class: `tag ${run.status}` }, run.status));
    return element("article", { class: "run panel" }, heading, element("dl", {}, ...items));
  }));
}

function table(spec) {
  const head = element("tr", {}, ...spec.columns.map((name) => element("th", {}, name)));
  const body = spec.rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, figure(cell)))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

function drawTables(root, tables) {
  const open = new Map([...root.querySelectorAll("details")].map((details) => [details.id, details.open]));
  root.replaceChildren(...tables.map((spec, position) => element(
    "details", { class: "panel", id: `table-${spec.id}`, open: open.get(`table-${spec.id}`) ?? position === 0 },
    element("summary", {}, spec.title), element("p", { class: "note" }, spec.note),
    element("div", { class: "scroll" }, table(spec)))));
}
