/** Starts and stops the training, and draws its losses over those of JAX. */
import { Chart } from "./chart.js";
import { $, drawn, fail, made, read, start } from "./model.js";
import { Trainer } from "./training.js";

const chart = new Chart($("chart"), "Training loss at each step, of JAX and of this page", (x) => chart.setCursor(x));
const relative = (x) => x.toExponential(1);

let trainer;
let losses = [];
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
  const { losses: jax, num_steps: numSteps } = trainer.facts;
  const worst = Math.max(...losses.map((loss, i) => Math.abs(loss - jax[i]) / jax[i]));
  const last = losses.length - 1;
  $("step").textContent = `${losses.length} of ${numSteps}`;
  $("here").textContent = losses[last]?.toFixed(4) ?? "–";
  $("there").textContent = losses.length ? jax[last].toFixed(4) : "–";
  $("largest").textContent = losses.length ? relative(worst) : "–";
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
      $("status").textContent = "Compiling, and comparing a step with JAX.";
      await drawn();
      await compare();
      isCompared = true;
    }
    $("status").textContent = "Training.";
    while (isRunning && losses.length < trainer.facts.num_steps) {
      losses.push(await trainer.next());
      show();
      await drawn();
    }
    $("status").textContent = losses.length < trainer.facts.num_steps ? "Stopped." : "Finished.";
  } catch (error) {
    fail(error, "Stopped.");
  }
  isRunning = false;
  show();
}

function reset() {
  trainer.reset();
  losses = [];
  $("status").textContent = "Ready.";
  show();
}

async function begin() {
  await start();
  $("models").hidden = !(await read("models.json", "json")).length;
  trainer = await Trainer.load("training");
  const { recipe, track, num_params: numParams, num_sequences: B, seq_len: T, settings, checked_step: step } = trainer.facts;
  $("what").textContent = `This page trains a model of ${numParams.toLocaleString("en")} parameters with recipe ${recipe}, made tiny, `
    + `on ${B} sequences of ${T} tokens a step from the synthetic stream of ${track}. It draws the losses over those of `
    + "JAX, which has trained on the same tokens from the same parameters, with the training step of speedrun run.";
  $("compared").textContent = `Step ${step}, from JAX's state`;
  const changed = Object.entries(settings).map(([key, value]) => `${key}=${value}`);
  $("settings").textContent = changed.length ? `Recipe ${recipe} with ${changed.join(", ")}.` : `Recipe ${recipe} without changes.`;
  $("status").textContent = "Ready.";
  show();
}

$("start").addEventListener("click", run);
$("stop").addEventListener("click", () => (isRunning = false));
$("reset").addEventListener("click", reset);
begin().catch((error) => fail(error, "Cannot compute."));
