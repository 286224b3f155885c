/** What the page computes from a run: smoothed losses, rates and MFU. */

const RECENT = 50; // steps of a rate

/** Steps of a mean: a fortieth of the run, from 5 to 200. */
export const widthOf = (numSteps) => Math.max(5, Math.min(200, Math.round(numSteps / 40)));

/** Trailing means of `width` values, fewer at the start. Means skip NaN. */
export function smoothed(values, width) {
  let sum = 0, count = 0;
  return values.map((value, at) => {
    if (Number.isFinite(value)) {
      sum += value;
      count += 1;
    }
    const left = values[at - width];
    if (at >= width && Number.isFinite(left)) {
      sum -= left;
      count -= 1;
    }
    return count && Number.isFinite(value) ? sum / count : NaN;
  });
}

export function median(values, share = 0.5) {
  const ranked = Float64Array.from(values).sort();
  return ranked.length ? ranked[Math.min(ranked.length - 1, Math.floor(share * ranked.length))] : NaN;
}

/** Tokens per second of training time over the last steps. */
export function rate(run) {
  const now = run.tokens.length - 1, before = Math.max(0, now - RECENT);
  return now > before ? (run.tokens[now] - run.tokens[before]) / (run.time[now] - run.time[before]) : NaN;
}

/** Model FLOPs per second, relative to the peak of the devices, or to the measured matmul rate if the peak is unknown. */
export function utilisation(run, peaks) {
  const { preflight, plan } = run;
  if (!preflight || !plan) return { share: NaN, of: "" };
  const kind = String(preflight.device_kind).toLowerCase();
  const peak = peaks.find(([name]) => name.toLowerCase() === kind)?.[1];
  const flops = plan.flops_per_token * rate(run);
  if (peak) return { share: flops / (peak * preflight.num_devices), of: "of the bf16 peak" };
  return { share: flops / (preflight.matmul_gflops * 1e9), of: "of the measured matmul rate" };
}
