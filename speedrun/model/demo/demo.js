/** Shows the training of this tab, which `tabs.js` computes on a thread of its own, and of the tabs that train with it. */
import { Chart } from "./chart.js";
import { $, made, read } from "./model.js";

const chart = new Chart($("chart"), "Training loss at each step, of JAX and of this browser", (x) => chart.setCursor(x));
const asked = new URLSearchParams(location.search);
let worker, facts;

function draw(losses) {
  const curve = (name, y, colour, width) => (
    { kind: "line", x: [...y.keys()], y, colour, width, say: (at) => `step ${at}, ${name}: ${y[at].toFixed(4)}` });
  const series = [curve("JAX", facts.losses, "--p4", 5), curve("this browser", losses, "--accent", 1.5)];
  chart.show({ series, lead: series[0], x: { label: "step", format: String }, y: { format: (loss) => loss.toFixed(1) } });
}

/** Draw JAX's curve of the chosen preset. */
async function choose() {
  facts = await read(`presets/${$("preset").value}/facts.json`, "json");
  $("more").href = `?preset=${$("preset").value}&train`;
  $("text").textContent = "After the last step, it continues “The run”.";
  draw([]);
}

function show({ order: { losses: mixed, leases, events }, own, me, device }) {
  const losses = [...mixed, ...own], number = losses.length, few = Math.min(10, number);
  const mean = (all) => (all.slice(number - few, number).reduce((a, b) => a + b, 0) / few).toFixed(3);
  const tabs = Object.entries(leases).map(([one, lease], i) => made("li", { className: one === me ? "own" : "" },
    `${i ? `Tab ${i + 1}` : "First tab"}${one === me ? ", this one" : ""}: batches ${lease} to ${lease + 9}`));
  $("tabs").replaceChildren(...tabs, ...events.map((what) => made("li", {}, what)));
  draw(losses);
  if (!number) return;
  const means = `Loss of the last ten: ${mean(losses)}; JAX: ${mean(facts.losses)}.`;
  $("status").textContent = `Step ${number} of ${facts.num_steps} on ${device}. ${means}`;
}

function hear({ data }) {
  if (data.order) show(data);
  if (data.text) $("text").textContent = data.text;
  if (data.end) stop(data.end);
}

function stop(why) {
  worker.terminate(); // frees the locks of this tab, as if it had closed
  $("train").disabled = $("preset").disabled = !($("stop").disabled = true);
  $("status").textContent += ` ${why}`;
}

async function train() {
  $("train").disabled = $("preset").disabled = !($("stop").disabled = false);
  $("status").textContent = "Compiling, or waiting for other tabs to end a round.";
  await choose();
  worker = new Worker("tabs.js", { type: "module" });
  worker.onmessage = hear;
  worker.onerror = ({ message }) => stop(`This browser cannot train: ${message ?? "a module failed"}.`);
  worker.postMessage({ preset: $("preset").value, device: asked.get("on") ?? undefined });
}

$("form").addEventListener("submit", (event) => (event.preventDefault(), train()));
$("stop").addEventListener("click", () => stop("Stopped, as if this tab had closed."));
$("preset").addEventListener("change", choose);
$("preset").value = asked.get("preset") ?? "tiny";
$("status").textContent = "Ready.";
await (asked.has("train") ? train() : choose()).catch(({ message }) => ($("status").textContent = message));
