/** The page: starts and stops the training, and draws its losses over those of JAX. */
import { Chart } from "./chart.js";
import { $, drawn, fail, made, read, start } from "./model.js";
import { Trainer } from "./training.js";

const chart = new Chart($("chart"), "Training loss at each step, of JAX and of this page", (x) => chart.setCursor(x));
const raised = (digits) => digits.replace(/[-\d]/g, (one) => (one === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[one]));
const relative = (x) => (x ? x.toExponential(1).replace(/e\+?(.*)/, (_, power) => ` × 10${raised(power)}`) : "0");
const median = (xs) => xs.toSorted((a, b) => a - b)[xs.length >> 1];

let trainer;
let losses = []; // of this page
let times = [];
let isRunning = false;
let isCompared = false;

function draw() {
  const { losses: jax } = trainer.facts, steps = [...jax.keys()];
  const curve = (name, y, look) => (
    { kind: "line", x: steps.slice(0, y.length), y, ...look, say: (at) => `step ${at}, ${name}: ${y[at].toFixed(4)}` });
  const lead = curve("JAX", jax, { colour: "--p4", width: 5 });
  const series = [lead, curve("this page", losses, { colour: "--accent", width: 1.5 })];
  chart.show({ series, lead, x: { label: "step", format: String }, y: { format: (loss) => loss.toFixed(1) } });
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
begin().catch((error) => fail(error, "Nothing can be computed."));
