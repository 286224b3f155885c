/** Content of the page: charts, tiles, events, schedule, samples and settings. */

import { sparkline } from "./chart.js";
import * as fit from "./fit.js";
import { bytes, loss, make, ms, seconds, short, swatch, whole } from "./text.js";

/** Colour and dash of a run by its number: no two neighbours share either. */
const DASHES = [[], [7, 4], [2, 3], [11, 3, 2, 3], [5, 5], [14, 4]];
export const lookOf = (number) => ({ colour: `--c${number % 6}`, dash: DASHES[(number + Math.floor(number / 6)) % 6] });

const GHOST = { colour: "--grey", dash: [4, 3] };

const time = (s) => (s < 10 && s % 1 ? `${+s.toPrecision(3)} s` : s < 600 ? `${+s.toFixed(1)} s` : `${+(s / 60).toFixed(1)} min`);
const axisOf = (axis) => (axis === "time" ? { label: "training time", format: time } : { label: "tokens", format: short });

/** The chart of losses: training losses, their means and validations of all shown runs, ghost and target. */
export function lossModel(runs, focus, view, rules) {
  const series = [], ghost = rules?.ghost;
  if (ghost) {
    const mean = fit.smoothed(ghost.loss, fit.widthOf(ghost.loss.length));
    series.push({
      kind: "line", x: view.axis === "time" ? ghost.time_s : ghost.tokens, y: mean, ...GHOST, width: 1.5,
      say: (at) => `ghost · ${seconds(ghost.time_s[at])} · ${short(ghost.tokens[at])} tokens · mean ${loss(mean[at])}`,
    });
  }
  let lead = null; // the cursor follows this one
  for (const run of [...runs.filter((one) => one !== focus), ...runs.filter((one) => one === focus)]) {
    const look = lookOf(run.number), width = fit.widthOf(run.numSteps), mean = fit.smoothed(run.loss, width);
    const name = runs.length > 1 ? `${run.name} · ` : "", x = run[view.axis];
    if (run === focus) series.push({ kind: "line", x, y: run.loss, colour: look.colour, alpha: 0.35, width: 1 });
    lead = {
      kind: "line", x, y: mean, ...look,
      say: (at, isLead) => `${name}step ${whole(run.steps[at] + 1)} · `
        + (isLead ? `${seconds(run.time[at])} · ${short(run.tokens[at])} tokens · loss ${loss(run.loss[at])}, ` : "")
        + `mean of ${Math.min(width, at + 1)}: ${loss(mean[at])}`,
    };
    series.push(lead, { kind: "points", x: run.vals.map((val) => val[view.axis]), y: run.vals.map((val) => val.loss), ...look });
  }
  return { series, lead, target: rules?.target, x: axisOf(view.axis), y: { format: (v) => (Math.abs(v) < 1e4 ? `${+v.toFixed(3)}` : short(v)) } };
}

/** The chart of step times; its axis ends where that of the losses does. */
export function stepModel(run, view, last) {
  const middle = fit.median(run.ms);
  const lead = {
    kind: "strip", x: run[view.axis], y: run.ms, colour: lookOf(run.number).colour, outlier: 1.5 * middle,
    say: (at) => `step ${whole(run.steps[at] + 1)} · ${ms(run.ms[at])}`,
  };
  const high = Math.max(4 * middle, 1.2 * fit.median(run.ms, 0.99));
  return { series: [lead], lead, x: { ...axisOf(view.axis), last }, y: { low: 0, high, format: (v) => (v < 1000 ? `${short(v)} ms` : time(v / 1000)) } };
}

export function keyOf(runs, focus, rules) {
  const look = lookOf(focus.number), width = fit.widthOf(focus.numSteps);
  const rows = [
    [swatch(look.dash, look.colour), `training loss, mean of ${width} steps; each step faint`],
    [swatch([], look.colour, "o"), "validation"],
  ];
  if (rules?.ghost) rows.push([swatch(GHOST.dash, GHOST.colour), `ghost: ${rules.ghost.record}`]);
  return rows.map(([mark, words]) => make("li", "", mark, make("span", "", words)));
}

const tile = (name, value, note = "") => make("div", "", make("dt", "", name), make("dd", "", value, note ? make("small", "", note) : null));

export function tiles(run, rules) {
  const val = run.vals.at(-1), width = fit.widthOf(run.numSteps), mean = fit.smoothed(run.loss, width).at(-1);
  const speed = fit.rate(run), used = fit.utilisation(run, rules?.peaks ?? []);
  const plan = run.plan, planned = (plan?.state_bytes_per_device ?? 0) + (plan?.temp_bytes_per_device ?? 0);
  return [
    ...(run.islands ? [islands(run)] : []),
    tile("training loss", loss(mean), run.loss.length ? `mean of ${Math.min(width, run.loss.length)}; last ${loss(run.loss.at(-1))}` : ""),
    tile("validation loss", loss(val?.loss), val ? `after ${whole(val.step)} steps of ${whole(run.numSteps)}` : ""),
    tile("step", whole(run.done), `of ${whole(run.numSteps)}; ${short(run.tokens.at(-1) ?? 0)} of ${short(plan?.total_tokens * (run.islands?.islands ?? 1))} tokens`),
    tile("training time", seconds(run.end?.train_time_s ?? run.time.at(-1)), run.end ? `${seconds(run.end.cold_wall_s)} in all` : "on the ranked clock"),
    target(run, rules),
    left(run),
    tile("step time", ms(fit.median(run.ms)), run.ms.length ? `median; 95 % below ${ms(fit.median(run.ms, 0.95))}` : ""),
    tile("tokens per second", short(speed), "over the last 50 steps"),
    tile("MFU", Number.isFinite(used.share) ? `${(100 * used.share).toFixed(1)} %` : "–", used.of),
    tile("memory per device", bytes(planned), `state ${bytes(plan?.state_bytes_per_device)}, temporary ${bytes(plan?.temp_bytes_per_device)}${run.end?.peak_bytes ? `; peak ${bytes(run.end.peak_bytes)}` : ""}`),
  ];
}

function islands(run) {
  const where = [...run.isles].map(([name, version]) => `${name} at round ${version + 1}`).join(", ");
  const said = `${where}; ${whole(run.rounds)} rounds, ${whole(run.refused)} answers refused, ${bytes(run.exchanged)} exchanged`;
  return tile("islands", `${run.isles.size} of ${run.islands.islands}`, said);
}

function left(run) {
  if (run.end) {
    const { compile_s, warmup_s, val_s, cold_wall_s, train_time_s } = run.end;
    const what = `compile ${seconds(compile_s)}, warm-up ${seconds(warmup_s)}, validation ${seconds(val_s)}`;
    return tile("outside the clock", seconds(cold_wall_s - train_time_s), what);
  }
  const steps = run.numSteps - run.done, middle = fit.median(run.ms.slice(-200));
  return tile("training left", seconds((steps * middle) / 1000), `${whole(steps)} steps at the median of the last 200`);
}

function target(run, rules) {
  const name = `target ${rules?.target ?? ""}`;
  const reached = run.vals.find((val) => val.loss <= (rules?.target ?? NaN));
  if (reached) return tile(name, "reached", `loss ${loss(reached.loss)} after ${seconds(reached.time)}`);
  return tile(name, run.end ? "missed" : "–");
}

export function summary(run) {
  if (!run.last) return "Waiting for the first line of the log.";
  const parts = [`${run.start?.recipe ?? "A recipe"} on ${run.start?.track ?? "a track"}, seed ${run.start?.seed ?? "?"}.`];
  if (run.status === "running") parts.push(`Now: ${run.phase}.`);
  if (run.error) parts.push(`${run.error.kind}: ${run.error.message}`);
  return parts.join(" ");
}

export function events(run) {
  return run.events.slice(-400).reverse().map(({ utc, kind, said, level }) =>
    make("li", level, make("span", "quiet", utc.slice(11, 19)), make("b", "", kind), make("span", "text", said)));
}

/** A small curve of each scheduled input. */
export function inputs(host, run) {
  const rows = [...run.inputs].slice(0, 24).map(([name, { at, value }]) => {
    const item = make("li", "", make("div", "what", make("span", "quiet", name), make("span", "", String(+value.at(-1).toPrecision(4)))), make("canvas"));
    item.setAttribute("aria-label", `${name}: ${value[0]} at step ${at[0]}, ${value.at(-1)} at step ${at.at(-1)}`);
    return item;
  });
  host.replaceChildren(...rows);
  [...run.inputs.values()].slice(0, 24).forEach(({ at, value }, number) => sparkline(host.children[number].lastElementChild, at, value));
}

/** The texts of the newest step. */
export function samples(texts) {
  const steps = texts.map((one) => one.step), newest = steps.length ? Math.max(...steps) : 0;
  const shown = texts.filter((one) => one.step === newest).slice(-8);
  return shown.map((one) => make("figure", "", make("figcaption", "", `step ${whole(one.step)}`), make("pre", "", make("b", "", one.prompt ?? ""), one.text)));
}

export function about(run) {
  const { preflight, data, plan } = run;
  const pairs = [["record", run.file.record], ["run", run.file.run]];
  if (preflight) {
    pairs.push(["devices", `${preflight.num_devices} × ${preflight.device_kind}${preflight.num_processes > 1 ? `, ${preflight.num_processes} processes` : ""}`]);
    pairs.push(["software", Object.entries(preflight.software ?? {}).map(([name, version]) => `${name} ${version}`).join(", ")]);
    if (preflight.commit) pairs.push(["commit", preflight.commit.slice(0, 12) + (preflight.dirty ? ", changed since" : "")]);
  }
  pairs.push(["settings", Object.entries(run.start?.overrides ?? {}).map(([name, value]) => `${name}=${value}`).join(", ") || "the recipe's"]);
  if (data) pairs.push(["data", `${data.train_shards.length} training shards; ${whole(data.val_tokens)} validation tokens`]);
  if (plan) pairs.push(["parameters", whole(plan.num_params)], ["tokens per step", whole(plan.tokens_per_step)], ["FLOPs per token", short(plan.flops_per_token)]);
  return pairs.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]);
}
