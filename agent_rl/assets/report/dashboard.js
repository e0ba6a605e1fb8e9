"use strict";
// Asks for the list and for the chosen runs every few seconds; the address says which runs are chosen: ?run=a&run=b

const EVERY_MS = 3000;
const at = (id) => document.getElementById(id);
let chosen = new URLSearchParams(location.search).getAll("run");
let stamp = "", most = 6, viewer = null, asked = 0;

async function ask(path) {
  const response = await fetch(path);
  const answer = await response.json();
  if (!response.ok) throw new Error(typeof answer.detail === "string" ? answer.detail : `the server answered ${response.status}`);
  return answer;
}

function query(names) { return names.map((name) => `run=${encodeURIComponent(name)}`).join("&"); }

function choose(names) {
  chosen = names.slice(-most);
  stamp = "";
  history.replaceState(null, "", chosen.length ? `?${query(chosen)}` : location.pathname);
  at("viewer").hidden = true;
  refresh();
}

function row(run) {
  const box = element("input", { type: "checkbox", checked: chosen.includes(run.name), ariaLabel: `compare ${run.name}` });
  box.addEventListener("change", () => choose(box.checked ? [...chosen, run.name] : chosen.filter((name) => name !== run.name)));
  const link = element("a", { href: `?${query([run.name])}` }, run.name);
  link.addEventListener("click", (event) => { if (!event.ctrlKey && !event.metaKey) { event.preventDefault(); choose([run.name]); } });
  const cells = [element("span", { class: "name" }, box, link), element("span", { class: `tag ${run.status}` }, run.status),
    `${run.step} / ${run.num_steps ?? "?"}`, figure(run.reward_mean), figure(run.eval_avg), figure(run.mismatch_mean_abs)];
  return element("tr", {}, ...cells.map((cell) => element("td", {}, cell)));
}

function say(problem) {
  at("message").textContent = problem ?? "";
  at("message").hidden = !problem;
}

async function refreshList() {
  const list = await ask("/api/runs");
  most = list.most;
  at("runs").replaceChildren(...list.runs.map(row));
  if (!list.runs.length) at("hint").textContent = "There is no run here yet; one appears as soon as it starts.";
  if (!chosen.length && list.runs.length) {
    const first = list.runs.find((run) => run.status === "running") ?? list.runs.at(-1);
    chosen = [first.name];
    at("runs").replaceChildren(...list.runs.map(row));
  }
}

async function refreshView() {
  const found = chosen.length ? await ask(`/api/view?${query(chosen)}&stamp=${encodeURIComponent(stamp)}`) : null;
  if (found?.stamp === stamp) return;
  at("more").hidden = !found;
  const { runs = [], charts = [], tables = [], colours = [] } = found ?? {};
  document.title = runs.map((run) => run.name).join(" · ") || "Runs";
  if (found) heading(document.querySelector("h1"), runs, colours);
  else document.querySelector("h1").textContent = "Runs";
  summary(at("summary"), runs, colours);
  drawTables(at("tables"), tables);
  navigation(document.querySelector("nav"), charts, found ? ["Tables", "Episode viewer"] : []);
  redraw = () => drawAll(at("charts"), charts);
  redraw();
  stamp = found?.stamp ?? "";
}

async function refresh() {
  const mine = ++asked;
  try {
    await refreshList();
    await refreshView();
    say(null);
  } catch (error) {
    if (mine !== asked) return; // something else has been chosen meanwhile
    say(error instanceof TypeError ? "The dashboard does not answer; is it still running?" : error.message);
    if (!(error instanceof TypeError)) {
      stamp = "";
      at("more").hidden = true;
      for (const id of ["summary", "charts"]) at(id).replaceChildren();
      delete at("charts").dataset.charts;
    }
  }
  at("state").textContent = `as of ${new Date().toLocaleTimeString()}`;
}

at("load").addEventListener("click", async () => {
  at("load").disabled = true;
  at("load").textContent = "Reading …";
  try {
    const samples = await Promise.all(chosen.map((name) => ask(`/api/episodes?run=${encodeURIComponent(name)}`)));
    const some = samples.filter((sample) => sample.episodes.length);
    at("viewer").hidden = !some.length;
    if (viewer && some.length) viewer.replace(some);
    else if (some.length) viewer = new EpisodeViewer(at("viewer"), some);
  } catch (error) { say(error.message); }
  at("load").disabled = false;
  at("load").textContent = "Load again";
});

async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, EVERY_MS);
}

poll();
