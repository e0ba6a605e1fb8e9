"use strict";
// The episode viewer. Whatever a model or a tool wrote is put into the page as text, never as HTML.

const STATES = ["inside the trust region", "inside, region tightened", "clipped: no gradient",
  "clipped because tightened", "dropped by a gate"];

// How a token is coloured: its value, the scale from 0 to 1 over the run's sample, and what the legend says.
const MODES = {
  d: { label: "|d|", key: "1", value: (t) => t.d === null ? null : Math.abs(t.d), log: true, unit: "nats" },
  logprob: { label: "log-prob", key: "2", value: (t) => t.mu === null ? null : -t.mu, unit: "−log-prob, nats" },
  entropy: { label: "entropy", key: "3", value: (t) => t.ent, unit: "nats" },
  kept: { label: "kept set", key: "4", value: (t) => t.kept, log: true, unit: "tokens kept" },
  version: { label: "version", key: "5", value: (t) => t.lag, unit: "versions behind" },
  clip: { label: "clip", key: "6", value: (t) => t.state },
};
const MODE_ALIASES = { lag: "version", "|d|": "d" };

function expand(episode, texts) {
  let index = 0;
  return episode.segments.map((segment) => ({
    ...segment,
    tokens: segment.tok.map((text, i) => ({
      index: index++, id: texts[text][0], text: texts[text][1], turn: segment.turn, sampled: segment.sampled,
      lp: segment.lp?.[i] ?? null, mu: segment.mu?.[i] ?? null, d: segment.d?.[i] ?? null, ent: segment.ent?.[i] ?? null,
      prox: segment.prox?.[i] ?? null, kept: segment.kept?.[i] ?? null, version: segment.ver?.[i] ?? null,
      lag: segment.ver ? episode.step - segment.ver[i] : null, state: segment.state?.[i] ?? null,
    })),
  }));
}

class EpisodeViewer {
  constructor(root, samples) {
    this.root = root;
    this.mode = "d"; this.order = "step";
    this.samples = samples; // one a run: {name, episodes, texts, num_recorded, notes}
    this.run = 0;
    this.tip = element("div", { class: "tip", hidden: true });
    document.body.append(this.tip);
    this.open();
    document.addEventListener("keydown", (event) => this.key(event));
    addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  replace(samples) { this.samples = samples; this.run = 0; this.open(); }

  get sample() { return this.samples[this.run]; }

  open() {
    this.expanded = this.sample.episodes.map((episode) => expand(episode, this.sample.texts));
    this.scales = Object.fromEntries(Object.keys(MODES).map((mode) => [mode, this.scale(mode)]));
    this.filters = {};
    this.chosen = 0;
    this.build();
  }

  scale(mode) {
    const values = this.expanded.flat().flatMap((segment) => segment.tokens)
      .filter((t) => t.sampled).map(MODES[mode].value).filter((v) => v !== null && Number.isFinite(v)).sort((a, b) => a - b);
    if (!values.length) return null;
    const high = values[Math.floor((values.length - 1) * 0.995)];
    const positive = values.find((v) => v > 0) ?? 1;
    // A log scale of at most four decades below the top: what is below is nothing.
    return { low: MODES[mode].log ? Math.max(positive, high * 1e-4) : 0, high: high || values.at(-1) || 1 };
  }

  heat(token) {
    const scale = this.scales[this.mode], value = MODES[this.mode].value(token);
    if (!scale || value === null) return 0;
    if (!MODES[this.mode].log) return Math.min(Math.max(value / scale.high, 0), 1);
    if (value <= scale.low || scale.high <= scale.low) return value >= scale.high && value > scale.low ? 1 : 0;
    return Math.min(Math.log(value / scale.low) / Math.log(scale.high / scale.low), 1);
  }

  build() {
    this.list = element("div", { class: "list" });
    this.pane = element("div", { class: "episode" });
    this.bar = element("div", { class: "filters" });
    this.pane.addEventListener("mouseover", (event) => this.hover(event));
    this.pane.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.pane.addEventListener("click", (event) => this.hover(event));
    this.root.replaceChildren(this.bar, this.list, this.pane);
    this.buildBar();
    this.refresh();
  }

  buildBar() {
    const each = (value) => [...new Set(this.sample.episodes.map(value))].sort((a, b) => typeof a === "number" ? a - b : String(a).localeCompare(b));
    const choice = (label, name, value) => element("label", {}, label, this.select(
      [["", "all"], ...each(value).map((v) => [String(v), typeof v === "number" ? figure(v) : v])], this.filters[name]?.text,
      (text) => { this.filters[name] = text === "" ? undefined : { text, value }; this.refresh(); }));
    const runs = this.samples.length < 2 ? [] : [element("label", {}, "Run", this.select(
      this.samples.map((s, i) => [String(i), s.name]), String(this.run), (text) => { this.run = Number(text); this.open(); }))];
    this.count = element("span", { class: "count" });
    this.bar.replaceChildren(...runs,
      choice("Step", "step", (e) => e.step), choice("Ended by", "stop", (e) => e.stop),
      choice("Reward", "reward", (e) => e.reward), choice("Group", "group", (e) => e.group),
      element("label", {}, "Order", this.select([["step", "step"], ["max_abs_d", "largest |d|"], ["reward", "reward"]], this.order,
        (text) => { this.order = text; this.refresh(); })), this.count);
  }

  select(options, chosen, change) {
    const made = element("select", {}, ...options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
    made.addEventListener("change", () => change(made.value));
    return made;
  }

  // The numbers, in the sample, of the episodes that the filters let through.
  get shown() {
    const tests = Object.values(this.filters).filter(Boolean);
    const all = this.sample.episodes.map((_, i) => i);
    const kept = all.filter((i) => tests.every(({ text, value }) => String(value(this.sample.episodes[i])) === text));
    const by = (i) => this.sample.episodes[i][this.order] ?? 0;
    return this.order === "step" ? kept : kept.sort((a, b) => by(b) - by(a) || a - b);
  }

  refresh() {
    const shown = this.shown, { episodes, num_recorded, notes } = this.sample;
    const left = num_recorded - episodes.length;
    this.count.textContent = `${shown.length} of ${episodes.length} in this file` + (left > 0 ? `; ${left.toLocaleString("en")} left out` : "");
    this.count.title = notes.join("; ");
    if (!shown.includes(this.chosen)) this.chosen = shown[0] ?? -1;
    this.list.replaceChildren(...shown.map((i) => this.item(i)));
    this.show(this.chosen);
  }

  item(i) {
    const e = this.sample.episodes[i];
    const button = element("button", { type: "button" },
      element("span", {}, `step ${e.step} · ep. ${e.id}`), element("span", { class: "reward" }, figure(e.reward)),
      element("small", {}, `${e.stop.replaceAll("_", " ")} · ${e.num_turns} turn${e.num_turns === 1 ? "" : "s"}`),
      element("small", { title: "largest |d| of a token" }, `|d| ≤ ${figure(e.max_abs_d)}`));
    button.dataset.episode = i;
    button.addEventListener("click", () => this.show(i, true));
    return button;
  }

  show(i, remember = false) {
    this.chosen = i;
    this.tip.hidden = true;
    for (const button of this.list.children) {
      const current = Number(button.dataset.episode) === i;
      button.setAttribute("aria-current", current);
      if (current) this.list.scrollTop = Math.min(Math.max(this.list.scrollTop, button.offsetTop + button.offsetHeight - this.list.clientHeight), button.offsetTop);
    }
    if (i < 0) { this.pane.replaceChildren(element("p", { class: "nothing" }, "No episode passes the filters.")); return; }
    const e = this.sample.episodes[i];
    this.pane.replaceChildren(this.head(e), this.facts(e), this.colours(), ...this.conversation(e, this.expanded[i]));
    this.pane.scrollTop = 0;
    this.paint();
    if (remember) this.remember();
  }

  head(e) {
    const step = (text, by, key) => {
      const button = element("button", { type: "button", title: `${key} key` }, text);
      button.addEventListener("click", () => this.move(by));
      button.dataset.move = by;
      return button;
    };
    return element("div", { class: "head" }, element("h3", {}, `Episode ${e.id}`),
      element("span", { class: "tag" }, e.stop.replaceAll("_", " ")),
      element("span", { class: "step" }, step("← Previous", -1, "←"), step("Next →", 1, "→")));
  }

  facts(e) {
    const parts = Object.entries(e.parts).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    const { temperature, top_p, top_k } = e.sampling;
    const sampling = `T ${figure(temperature)}` + (top_p < 1 ? `, top-p ${figure(top_p)}` : "") + (top_k > 0 ? `, top-k ${top_k}` : "");
    const facts = [["trained at step", e.step], ["group", e.group], ["reward", figure(e.reward) + (parts ? ` (${parts})` : "")],
      ["advantage", (e.advantage > 0 ? "+" : "") + figure(e.advantage)], ["reference answer", e.answer],
      ["mean |d|", figure(e.mean_abs_d)], ["largest |d|", figure(e.max_abs_d)], ["sampled at", sampling],
      ...(e.attempt ? [["attempt", e.attempt]] : []), ...Object.entries(e.tags)];
    return element("div", { class: "facts" }, ...facts.map(([name, value]) =>
      element("span", {}, `${name} `, element("b", {}, typeof value === "object" ? JSON.stringify(value) : String(value)))));
  }

  colours() {
    this.modes = element("div", { class: "modes", role: "group", ariaLabel: "Colour tokens by" }, ...Object.entries(MODES).map(([mode, { label, key }]) => {
      const known = this.scales[mode] !== null;
      const why = known ? `${key} key` : mode === "kept" ? "the full vocabulary was sampled" : "not recorded for this run";
      const button = element("button", { type: "button", disabled: !known, title: why }, label);
      button.dataset.mode = mode;
      button.addEventListener("click", () => this.colour(mode));
      return button;
    }));
    this.legend = element("div", { class: "legend" });
    return element("div", { class: "colours" }, this.modes, this.legend);
  }

  colour(mode) { if (this.scales[mode]) { this.mode = mode; this.paint(); this.remember(); } }

  paint() {
    for (const button of this.modes.children) button.setAttribute("aria-pressed", button.dataset.mode === this.mode);
    for (const span of this.pane.querySelectorAll(".t[data-s]")) {
      const token = this.token(span), clip = this.mode === "clip";
      span.classList.remove("s1", "s2", "s3", "s4");
      if (clip && token.state) span.classList.add(`s${token.state}`);
      span.style.setProperty("--h", clip ? 0 : (0.8 * this.heat(token)).toFixed(3));
    }
    this.root.dataset.mode = this.mode;
    const scale = this.scales[this.mode], { log, unit } = MODES[this.mode];
    this.legend.replaceChildren(...(this.mode === "clip"
      ? STATES.slice(1).map((text, i) => element("span", { class: `t s${i + 1}` }, text))
      : scale ? [log ? `≤ ${figure(scale.low)}` : figure(scale.low), element("i"), `≥ ${figure(scale.high)} ${unit}${log ? ", log" : ""}`] : []));
  }

  token(span) { return this.expanded[this.chosen][span.dataset.s].tokens[span.dataset.i]; }

  conversation(e, segments) {
    const blocks = [];
    const problem = e.messages.map((m) => `${m.role}: ${m.content}`).join("\n");
    const turns = new Map(e.turns.map((turn) => [turn.turn, turn]));
    segments.forEach((segment, s) => {
      if (segment.sampled) blocks.push(this.turn(segment, s, turns.get(segment.turn)));
      else if (segment.turn < 0) blocks.push(this.fold("Prompt", problem, segment, s, true));
      else blocks.push(...this.tools(segment, s, turns.get(segment.turn)));
    });
    return blocks;
  }

  turn(segment, s, turn) {
    const values = segment.tokens.map((t) => Math.abs(t.d ?? 0)), versions = new Set(segment.ver);
    const mean = values.reduce((a, b) => a + b, 0) / values.length;
    const facts = [`${segment.tokens.length} tokens`, `mean |d| ${figure(mean)}`, `version ${[...versions].join(", ")}`,
      ...(turn?.generate_s ? [`sampled in ${figure(turn.generate_s)} s`] : [])];
    const header = element("header", {}, element("b", {}, `Turn ${segment.turn}`), ...facts.map((text) => element("span", {}, text)));
    const calls = (turn?.calls ?? []).map((call) => this.call(call));
    return element("div", { class: "turn" }, header, this.tokens(segment, s), ...calls);
  }

  call(call) {
    const [only] = Object.values(call.arguments ?? {}), code = typeof only === "string" && Object.keys(call.arguments).length === 1;
    const text = code ? only : JSON.stringify(call.arguments, null, 2);
    const failed = call.error ? element("pre", { class: "failed" }, call.error) : null;
    return element("details", { class: "fold" },
      element("summary", {}, `Call ${call.name || "(malformed)"}  `, element("code", {}, text.split("\n")[0])), failed, element("pre", {}, text));
  }

  tools(segment, s, turn) {
    const results = turn?.results ?? [];
    const time = turn?.tool_s ? ` (${figure(turn.tool_s)} s)` : "";
    if (!results.length) return [this.fold("Given", "", segment, s)];
    return results.map((text, i) => this.fold(`Output${time}`, text, i === 0 ? segment : null, s));
  }

  fold(name, text, segment, s, open = false) {
    return element("details", { class: "fold", open },
      element("summary", {}, `${name}  `, element("code", {}, text.split("\n")[0])), text.includes("\n") ? element("pre", {}, text) : null,
      segment ? this.tokens(segment, s) : null);
  }

  tokens(segment, s) {
    const root = element("div", { class: segment.sampled ? "tokens" : "tokens given" });
    segment.tokens.forEach((token, i) => {
      const span = element("span", { class: token.text === "" ? "t empty" : "t" }, token.text.replaceAll("\n", "↵\n"));
      span.dataset.s = s; span.dataset.i = i;
      root.append(span);
    });
    return root;
  }

  hover(event) {
    const span = event.target.closest(".t[data-s]");
    if (!span) { this.tip.hidden = true; return; }
    const t = this.token(span);
    const rows = [["id", t.id], ["position", t.index], ["turn", t.turn < 0 ? "prompt" : t.turn]];
    if (t.sampled) rows.push(["log-prob, trainer", figure(t.lp)], ["log-prob, behaviour μ", figure(t.mu)], ["d", figure(t.d)],
      ...(t.prox === null ? [] : [["log-prob, proximal μ̃", figure(t.prox)]]), ["entropy", figure(t.ent)],
      ["kept set", t.kept === null ? "full" : t.kept], ["version", `${t.version} (lag ${t.lag})`],
      ...(t.state === null ? [] : [["clip", STATES[t.state]]]));
    else rows.push(["", "given, not sampled"]);
    this.tip.replaceChildren(element("code", {}, JSON.stringify(t.text)), element("table", {}, ...rows.map(([name, value]) =>
      element("tr", {}, element("td", { style: "padding:0;text-align:left" }, name), element("td", {}, String(value))))));
    this.tip.hidden = false;
    const place = span.getBoundingClientRect(), tip = this.tip.getBoundingClientRect();
    const below = place.bottom + 6 + tip.height < innerHeight;
    this.tip.style.left = `${Math.max(6, Math.min(place.left, innerWidth - tip.width - 6))}px`;
    this.tip.style.top = `${below ? place.bottom + 6 : Math.max(6, place.top - tip.height - 6)}px`;
  }

  move(by) {
    const shown = this.shown, at = shown.indexOf(this.chosen) + by;
    if (at >= 0 && at < shown.length) this.show(shown[at], true);
  }

  key(event) {
    if (event.target.closest?.("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const box = this.root.getBoundingClientRect();
    if (box.top > innerHeight || box.bottom < 0) return; // out of sight
    const mode = Object.keys(MODES).find((name) => MODES[name].key === event.key);
    if (event.key === "ArrowRight") this.move(1);
    else if (event.key === "ArrowLeft") this.move(-1);
    else if (mode) this.colour(mode);
    else return;
    event.preventDefault();
  }

  // The address says what is shown, so that it can be sent to somebody: #episode=3&color=version&run=0
  remember() {
    const parts = new URLSearchParams({ episode: this.chosen, color: this.mode, ...(this.run ? { run: this.run } : {}) });
    history.replaceState(null, "", `#${parts}`);
  }

  follow() {
    const wanted = new URLSearchParams(location.hash.slice(1));
    if (!wanted.has("episode")) return;
    const run = Number(wanted.get("run") ?? this.run), mode = MODE_ALIASES[wanted.get("color")] ?? wanted.get("color");
    if (run !== this.run && this.samples[run]) { this.run = run; this.open(); }
    if (MODES[mode] && this.scales[mode]) this.mode = mode;
    const episode = Number(wanted.get("episode"));
    if (this.sample.episodes[episode]) { this.filters = {}; this.buildBar(); this.chosen = episode; this.refresh(); }
    this.root.scrollIntoView();
  }
}
