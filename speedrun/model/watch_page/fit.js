/** What is computed from a run: smoothed losses, rates, MFU, and when the target may be reached. */

const LEAST = 30; // steps in a fit
const FREE = 10; // losses in a fit, as many independent ones as are worth its correlated ones
const NEW = 0.75; // a fit has the steps after this share of the tokens so far
const RECENT = 50; // steps of a rate

/** The number of steps in a mean: a fortieth of the run, at least 5 and at most 200. */
export const widthOf = (numSteps) => Math.max(5, Math.min(200, Math.round(numSteps / 40)));

/** Trailing means of `width` values; of fewer at the beginning. NaN stays out of the means. */
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

/** Tokens per second of training, over the last 50 steps. */
export function rate(run) {
  const now = run.tokens.length - 1, before = Math.max(0, now - RECENT);
  return now > before ? (run.tokens[now] - run.tokens[before]) / (run.time[now] - run.time[before]) : NaN;
}

/** Model FLOPs per second over the peak of the devices; where that is unknown, over the measured rate of a product. */
export function utilisation(run, peaks) {
  const { preflight, plan } = run;
  if (!preflight || !plan) return { share: NaN, of: "" };
  const kind = String(preflight.device_kind).toLowerCase();
  const peak = peaks.find(([name]) => name.toLowerCase() === kind)?.[1];
  const flops = plan.flops_per_token * rate(run);
  if (peak) return { share: flops / (peak * preflight.num_devices), of: "of the bf16 peak" };
  return { share: flops / (preflight.matmul_gflops * 1e9), of: "of the measured matmul rate" };
}

/**
 * When the target is reached, as seconds on the ranked clock.
 *
 * Least squares of the training losses of the last quarter of the tokens so far on log(tokens). The interval is Fieller's
 * for where the line crosses the target, 95 %, widened by the autocorrelation of the residuals. Training loss stands
 * for validation loss, and a falling learning rate bends the curve down.
 */
export function arrival(run, target) {
  if (!Number.isFinite(target)) return { none: "no target" };
  const reached = run.vals.find((val) => val.loss <= target);
  if (reached) return { reached };
  if (run.end || run.error) return { none: "the run ended above the target" };
  const last = run.tokens.at(-1) ?? 0;
  const x = [], y = [];
  run.tokens.forEach((tokens, at) => {
    if (tokens >= NEW * last && Number.isFinite(run.loss[at])) {
      x.push(Math.log(tokens));
      y.push(run.loss[at]);
    }
  });
  if (x.length < LEAST) return { none: `needs ${LEAST} steps in the last quarter so far` };
  const line = leastSquares(x, y);
  if (line.y + line.slope * (Math.log(last) - line.x) <= target) return { atTarget: true };
  if (!(line.free >= FREE)) return { none: "each training loss is too much like the one before" };
  const z = student(line.free - 2);
  const g = (z * z * line.variance) / (line.slope ** 2 * line.spread);
  if (line.slope >= 0 || g >= 1) return { none: "the loss does not fall measurably" };
  const d = (target - line.y) / line.slope;
  const half = ((z * Math.sqrt(line.variance)) / -line.slope) * Math.sqrt((1 - g) / x.length + (d * d) / line.spread);
  const speed = rate(run), now = run.time.at(-1);
  const at = (logTokens) => now + Math.max(0, Math.exp(logTokens) - last) / speed;
  const [low, high] = [d - half, d + half].map((one) => at(line.x + one / (1 - g)));
  const planned = now + Math.max(0, (run.plan?.total_tokens ?? Infinity) - last) / speed;
  return { time: at(line.x + d), low, high, late: low > planned, ends: planned };
}

/** The 97.5 % quantile of Student's t, by Abramowitz and Stegun 26.7.5: to 0.001 from 8 degrees of freedom on. */
export function student(freedom) {
  const z = 1.959964;
  const terms = [
    (z ** 3 + z) / 4,
    (5 * z ** 5 + 16 * z ** 3 + 3 * z) / 96,
    (3 * z ** 7 + 19 * z ** 5 + 17 * z ** 3 - 15 * z) / 384,
  ];
  return terms.reduce((sum, term, at) => sum + term / freedom ** (at + 1), z);
}

/**
 * Slope and means; `spread`: sum of squared deviations of x.
 *
 * `free`: n (1 - r) / (1 + r), the number of independent losses whose mean is as certain, with r the autocorrelation of
 * the residuals at lag one. Residuals of a line have it lower by about (2 + 4 r) / n, which is undone. `variance`: that
 * of y, as `variance / n` is the squared standard error of its mean; the residuals have free - 2 degrees of freedom.
 */
export function leastSquares(xs, ys) {
  const n = xs.length, x = xs.reduce((a, b) => a + b) / n, y = ys.reduce((a, b) => a + b) / n;
  let spread = 0, cross = 0;
  for (let i = 0; i < n; i++) {
    spread += (xs[i] - x) ** 2;
    cross += (xs[i] - x) * (ys[i] - y);
  }
  const slope = cross / spread;
  let squares = 0, lagged = 0, before = 0;
  for (let i = 0; i < n; i++) {
    const residual = ys[i] - y - slope * (xs[i] - x);
    squares += residual ** 2;
    lagged += residual * before;
    before = residual;
  }
  const r = Math.min(1, Math.max(0, squares ? ((n * lagged) / squares + 2) / (n - 4) : 0));
  const free = (n * (1 - r)) / (1 + r);
  return { slope, x, y, spread, free, variance: squares / (free - 2) };
}
