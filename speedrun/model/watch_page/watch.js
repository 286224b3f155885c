/** Reads the feed, keeps the runs, and redraws what changed. */

import { Chart } from "./chart.js";
import * as panels from "./panels.js";
import { Run } from "./run.js";
import { fill, make, seconds, swatch } from "./text.js";

const SILENT_S = 30, BUSY_S = 600; // without a line, in training and in other phases
const DEAD_MS = 15000; // without a beat
const DRAW_MS = 250;

const $ = (id) => document.getElementById(id);
const runs = new Map(), texts = new Map(), rules = new Map(), hidden = new Set();
const view = { axis: "time", focus: null };
const feed = { isOn: false, tries: 0, heard: 0, ahead: 0, folders: [], ended: false, source: null };
let isDue = true;

const charts = ["loss", "steps"].map((id) => new Chart($(id), id === "loss" ? "Loss" : "Time of each step", point));
function point(x) {
  for (const chart of charts) chart.setCursor(x);
}

/* ---- the feed */

function connect() {
  const source = new EventSource("feed");
  feed.source = source;
  const on = (name, take) => source.addEventListener(name, (event) => {
    feed.heard = performance.now();
    take(JSON.parse(event.data));
    isDue = true;
  });
  on("files", (listing) => {
    feed.folders = listing.folders;
    listing.files.forEach(know);
  });
  on("lines", ({ key, anew, lines }) => {
    if (runs.has(key)) runs.get(key).read(lines, anew);
    else if (texts.has(key)) readSamples(texts.get(key), lines, anew);
  });
  on("beat", ({ now }) => {
    feed.ahead = Date.parse(now) - Date.now(); // clocks of two machines differ
    Object.assign(feed, { isOn: true, tries: 0, ended: false });
  });
  on("end", () => (feed.ended = true));
  source.onerror = lost;
}

function lost() {
  feed.source.close();
  feed.isOn = false;
  isDue = true;
  setTimeout(connect, Math.min(10000, 500 * 2 ** feed.tries++));
}

function know(file) {
  if (file.kind === "log") {
    if (!runs.has(file.key)) runs.set(file.key, Object.assign(new Run(file), { number: runs.size }));
    runs.get(file.key).file = file;
    view.focus ??= file.key;
  } else if (!texts.has(file.key)) texts.set(file.key, { record: file.record_key, list: [] });
}

function readSamples(file, lines, anew) {
  const found = lines.filter((raw) => raw !== null).map((raw) => JSON.parse(raw));
  const all = [...(anew ? [] : file.list), ...found].sort((a, b) => a.step - b.step);
  file.list = all.slice(-64); // older checkpoints may be sampled last
}

/** The target and the ghost of a track; null until they arrive. */
function rulesOf(run) {
  const track = run?.start?.track;
  if (typeof track !== "string") return null;
  if (!rules.has(track)) {
    rules.set(track, null);
    fetch(`rules?track=${encodeURIComponent(track)}`)
      .then((reply) => reply.json())
      .then((found) => {
        rules.set(track, found);
        isDue = true;
      })
      .catch(() => setTimeout(() => rules.delete(track), 2000));
  }
  return rules.get(track);
}

/* ---- drawing */

const quietFor = (run) => (run.last ? (Date.now() + feed.ahead - Date.parse(run.last)) / 1000 : 0);

function statusOf(run) {
  if (run.status !== "running") return [run.status, { finished: "finished", "crashed": "broke" }[run.status] ?? ""];
  const quiet = quietFor(run);
  const most = run.phase === "training" ? Math.max(SILENT_S, (3 * (run.ms.at(-1) ?? 0)) / 1000) : BUSY_S;
  return feed.isOn && quiet > most ? [`silent for ${seconds(quiet)}`, "silent"] : ["running", "running"];
}

function trouble(run) {
  const said = [];
  if (feed.ended && !feed.isOn) said.push("The server has ended. This page keeps what it got.");
  else if (!feed.isOn && feed.heard) said.push("The server does not answer; trying again. This page keeps what it got.");
  for (const folder of feed.folders) if (!folder.exists) said.push(`Waiting for ${folder.name}: it does not exist yet.`);
  if (feed.isOn && !runs.size && feed.folders.every((folder) => folder.exists)) said.push("Waiting for the first run.");
  for (const one of runs.values()) if (one.file.problem) said.push(`${one.file.run}: ${one.file.problem}`);
  for (const problem of rulesOf(run)?.problems ?? []) said.push(problem);
  return said.join(" ");
}

/** A screen reader reads what is set, so set only what changed. */
function say(id, words) {
  if ($(id).textContent !== words) $(id).textContent = words;
}

function drawHead(run) {
  const [status, name] = run ? statusOf(run) : [feed.isOn ? "waiting" : "connecting", ""];
  $("status").textContent = status;
  $("status").className = `chip ${name}`;
  $("title").textContent = run ? run.name : "speedrun watch";
  document.title = run ? `${run.name} · ${status.startsWith("silent") ? "silent" : status}` : "speedrun watch";
  say("summary", run ? panels.summary(run) : "");
  const bad = trouble(run);
  say("trouble", bad);
  $("trouble").hidden = !bad;
}

function drawLegend() {
  $("runs").hidden = runs.size < 2;
  if (runs.size < 2) return;
  const { show: shown, focus: focused } = $("legend").contains(document.activeElement) ? document.activeElement.dataset : {};
  fill($("legend"), [...runs].map(([key, run]) => {
    const { dash, colour } = panels.lookOf(run.number);
    const show = make("input"), focus = make("input");
    Object.assign(show, { type: "checkbox" }).toggleAttribute("checked", !hidden.has(key));
    Object.assign(focus, { type: "radio", name: "focus" }).toggleAttribute("checked", view.focus === key);
    show.setAttribute("aria-label", `show ${run.name}`);
    show.dataset.show = focus.dataset.focus = key;
    return make("li", "", show, make("label", "", focus, swatch(dash, colour), make("span", "", run.name), make("span", "quiet", statusOf(run)[0])));
  }));
  if (shown || focused) $("legend").querySelector(shown ? `[data-show="${shown}"]` : `[data-focus="${focused}"]`)?.focus();
}

function drawDetails(run) {
  const known = rulesOf(run), shown = [...runs.values()].filter((one) => !hidden.has(one.file.key) && one.steps.length);
  charts[0].show(panels.lossModel(shown, run, view, known));
  charts[1].show(panels.stepModel(run, view, charts[0].last));
  $("loss").setAttribute("aria-label", `Loss against ${view.axis}. ${$("summary").textContent} Arrow keys read single steps.`);
  $("steps").setAttribute("aria-label", "Time of each step. Arrow keys read single steps.");
  fill($("key"), panels.keyOf(shown, run, known));
  fill($("tiles"), panels.tiles(run, known));
  fill($("events"), panels.events(run));
  fill($("about"), panels.about(run));
  $("schedule").hidden = !run.inputs.size;
  panels.inputs($("inputs"), run);
  const all = [...texts.values()].find((one) => one.record === run.file.record_key)?.list ?? [];
  $("samples").hidden = !all.length;
  fill($("texts"), panels.samples(all));
  $("unread").textContent = run.unread ? `${run.unread} invalid lines` : "";
}

function draw() {
  const run = runs.get(view.focus);
  drawHead(run);
  if (!isDue) return;
  isDue = false;
  drawLegend();
  if (run) drawDetails(run);
}

function drawAnew() {
  isDue = true;
  draw();
}

/* ---- controls */

function choose(name, value) {
  view[name] = value;
  point(null);
  drawAnew();
}

document.addEventListener("change", ({ target }) => {
  if (target.name === "axis") choose("axis", target.value);
  if (target.dataset.focus) choose("focus", target.dataset.focus);
  if (target.dataset.show) {
    if (target.checked) hidden.delete(target.dataset.show);
    else hidden.add(target.dataset.show);
    drawAnew();
  }
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (isDue = true));

connect();
setInterval(() => {
  if (feed.isOn && performance.now() - feed.heard > DEAD_MS) lost();
  if (!document.hidden) draw();
}, DRAW_MS);
