/** The page: starts and stops the training, and draws its losses over those of JAX. */
import { $, drawn, fail, made, read, start } from "./model.js";
import { Trainer } from "./training.js";

const [HEIGHT, LEFT, RIGHT, BOTTOM, TOP] = [300, 36, 12, 24, 8]; // as in train.css
const raised = (digits) => digits.replace(/[-\d]/g, (one) => (one === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[one]));
const relative = (x) => (x ? x.toExponential(1).replace(/e\+?(.*)/, (_, power) => ` × 10${raised(power)}`) : "0");
const median = (xs) => xs.toSorted((a, b) => a - b)[xs.length >> 1];

let trainer;
let losses = []; // of this page
let times = [];
let isRunning = false;
let isCompared = false;

function element(name, attributes, text = "") {
  const one = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
  one.textContent = text;
  return one;
}

function draw() {
  const { losses: jax, num_steps: numSteps } = trainer.facts;
  const [low, high] = [Math.floor(2 * Math.min(...jax)) / 2, Math.ceil(2 * Math.max(...jax)) / 2];
  const width = $("chart").clientWidth;
  const x = (step) => LEFT + (step / (numSteps - 1)) * (width - LEFT - RIGHT);
  const y = (loss) => TOP + ((high - loss) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  for (let loss = low; loss <= high; loss += 0.5) {
    parts.push(element("line", { class: "grid", x1: LEFT, x2: width, y1: y(loss), y2: y(loss) }));
    parts.push(element("text", { x: LEFT - 6, y: y(loss) + 4, "text-anchor": "end" }, loss.toFixed(1)));
  }
  for (const step of [0, (numSteps - 1) >> 1, numSteps - 1]) {
    parts.push(element("text", { x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, String(step)));
  }
  for (const [kind, curve] of [["jax", jax], ["page", losses]]) {
    parts.push(element("polyline", { class: kind, points: curve.map((loss, i) => `${x(i)},${y(loss)}`).join(" ") }));
  }
  $("chart").replaceChildren(...parts);
}

function show() {
  const { losses: jax, nudged, num_steps: numSteps } = trainer.facts;
  const worst = (others) => Math.max(...losses.map((_, i) => Math.abs(others[i] - jax[i]) / jax[i]));
  const last = losses.length - 1;
  $("step").textContent = `${losses.length} of ${numSteps}`;
  $("here").textContent = losses[last]?.toFixed(4) ?? "–";
  $("there").textContent = losses.length ? jax[last].toFixed(4) : "–";
  $("largest").textContent = losses.length ? relative(worst(losses)) : "–";
  $("nudged").textContent = losses.length ? relative(worst(nudged)) : "–";
  $("speed").textContent = times.length ? `${median(times).toFixed(0)} ms` : "–";
  $("start").textContent = losses.length ? "Go on" : "Start";
  $("start").disabled = isRunning || losses.length === numSteps;
  $("stop").disabled = !isRunning;
  $("reset").disabled = isRunning || !losses.length;
  draw();
}

async function compare() {
  const found = await trainer.compare();
  const largest = (parts) => Object.entries(parts).reduce((a, b) => (b[1] > a[1] ? b : a));
  const rows = [
    ["Forward: the loss", found.loss, "–"],
    ["Gradient", ...largest(found.gradient).reverse()],
    ["Update", ...largest(found.update).reverse()],
  ];
  $("checks").replaceChildren(...rows.map(([what, off, at]) =>
    made("tr", {}, made("th", { scope: "row" }, what), made("td", {}, relative(off)), made("td", {}, at))));
}

async function run() {
  isRunning = true;
  $("error").hidden = true;
  show();
  try {
    if (!isCompared) {
      $("status").textContent = "Compiles, and compares one step with JAX.";
      await drawn();
      await compare();
      isCompared = true;
    }
    $("status").textContent = "Trains.";
    while (isRunning && losses.length < trainer.facts.num_steps) {
      const began = performance.now();
      losses.push(await trainer.next());
      times.push(performance.now() - began);
      show();
      await drawn();
    }
    $("status").textContent = losses.length < trainer.facts.num_steps ? "Stopped." : "All steps are done.";
  } catch (error) {
    fail(error, "Stopped.");
  }
  isRunning = false;
  show();
}

function reset() {
  trainer.reset();
  [losses, times] = [[], []];
  $("status").textContent = "Ready.";
  show();
}

async function begin() {
  await start();
  $("models").hidden = !(await read("models.json", "json")).length;
  trainer = await Trainer.load("training");
  const { recipe, track, num_params: numParams, num_sequences: B, seq_len: T, settings, checked_step: step } = trainer.facts;
  $("what").textContent = `A model of ${numParams.toLocaleString("en")} parameters is trained here, by recipe ${recipe}, made `
    + `tiny, on ${B} sequences of ${T} tokens a step of ${track}'s synthetic stream. Its losses are drawn over those of `
    + "JAX, which has trained on the same tokens, from the same numbers, with the training step of speedrun run.";
  $("compared").textContent = `Step ${step}, from where JAX was`;
  const changed = Object.entries(settings).map(([key, value]) => `${key}=${value}`);
  $("settings").textContent = changed.length ? `Recipe ${recipe} with ${changed.join(", ")}.` : `Recipe ${recipe} as it is.`;
  $("status").textContent = "Ready.";
  show();
}

$("start").addEventListener("click", run);
$("stop").addEventListener("click", () => (isRunning = false));
$("reset").addEventListener("click", reset);
addEventListener("resize", () => trainer && draw());
begin().catch((error) => fail(error, "Nothing can be computed."));
