/** One run, from the lines of its log. A line that does not decode is counted, and changes nothing. */

import * as text from "./text.js";

const finite = (value) => typeof value === "number" && Number.isFinite(value);
const LOUD = { warning: "odd", error: "bad" };
const KEPT = 400; // events that are shown

export class Run {
  constructor(file) {
    this.file = file;
    this.clear();
  }

  clear() {
    Object.assign(this, { start: null, preflight: null, data: null, plan: null, end: null, error: null });
    Object.assign(this, { steps: [], time: [], loss: [], tokens: [], ms: [], vals: [], events: [], inputs: new Map() });
    Object.assign(this, { unread: 0, last: null, phase: "waiting for the first line", before: 0, pauses: 0 });
    this.version = (this.version ?? 0) + 1;
  }

  get name() {
    return this.start?.run_id ?? (this.file.run || this.file.record);
  }

  get numSteps() {
    return this.start?.num_steps ?? 0;
  }

  /** Steps that are finished, counted from the beginning of the training, also of a run that was resumed. */
  get done() {
    return this.steps.length ? this.steps.at(-1) + 1 : 0;
  }

  read(lines, anew) {
    if (anew) {
      const isOther = this.first && this.first !== lines[0]; // else the page was connected again
      this.clear();
      this.first = lines[0];
      if (isOther) this.note("", "log", "another log is in its place");
    }
    for (const raw of lines) {
      try {
        if (raw === null) throw new SyntaxError("not UTF-8");
        const line = JSON.parse(raw);
        if (typeof line.t_utc !== "string" || typeof line.event.ev !== "string") throw new SyntaxError("not a log line");
        this.take(line.event, line.t_utc);
        this.last = line.t_utc;
      } catch (problem) {
        if (!(problem instanceof SyntaxError || problem instanceof TypeError)) throw problem;
        this.unread += 1;
      }
    }
    this.version += 1;
  }

  note(utc, kind, said) {
    this.events.push({ utc, kind, said, level: LOUD[kind] ?? "" });
    if (this.events.length > 2 * KEPT) this.events.splice(0, KEPT);
  }

  take(event, utc) {
    const known = TAKE[event.ev];
    if (!known) throw new SyntaxError("an event that this page does not know");
    known(this, event, utc);
  }

  step(event) {
    if (!finite(event.step) || !finite(event.train_time_s) || !finite(event.tokens_seen)) throw new SyntaxError("a step");
    this.steps.push(event.step);
    this.time.push(event.train_time_s);
    this.tokens.push(event.tokens_seen);
    this.loss.push(finite(event.loss) ? event.loss : NaN);
    this.ms.push((event.train_time_s - this.before) * 1000);
    this.before = event.train_time_s;
    this.phase = "training";
    for (const [name, value] of Object.entries(event.inputs ?? {})) {
      if (!finite(value) && typeof value !== "boolean") continue;
      if (!this.inputs.has(name)) this.inputs.set(name, { at: [], value: [] });
      const input = this.inputs.get(name);
      input.at.push(event.step);
      input.value.push(Number(value));
    }
  }

  val(event, utc) {
    if (!finite(event.loss) || !finite(event.step)) throw new SyntaxError("a validation");
    const { step, loss } = event;
    this.vals.push({ step, loss, tokens: this.tokens.at(-1) ?? this.origin ?? 0, time: this.before });
    this.note(utc, "validation", `step ${text.whole(step)}: loss ${text.loss(loss)}, in ${text.seconds(event.seconds)} with the clock stopped`);
  }

  get status() {
    if (this.end) return this.end.status === "finished" ? "finished" : "broke off";
    if (this.error) return "broke off";
    return this.last ? "running" : "waiting";
  }
}

const said = (object) => Object.entries(object ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");

const TAKE = {
  run_start(run, event, utc) {
    run.start = event;
    run.phase = "checking the machine";
    run.note(utc, "start", `${event.recipe} on ${event.track}, seed ${event.seed}`);
  },
  preflight(run, event, utc) {
    run.preflight = event;
    run.phase = "compiling";
    run.note(utc, "machine", `${event.num_devices} × ${event.device_kind}, ${text.short(event.matmul_gflops * 1e9)}FLOP/s measured`);
  },
  data(run, event) {
    run.data = event;
  },
  plan(run, event, utc) {
    run.plan = event;
    run.note(utc, "plan", `${text.short(event.num_params)} parameters, ${text.short(event.total_tokens)} tokens`);
  },
  compile(run, event, utc) {
    run.phase = "compiling";
    run.note(utc, "compile", `${event.name} in ${text.seconds(event.seconds)}${event.cache && event.cache !== "off" ? `, cache ${event.cache}` : ""}`);
  },
  warmup_start(run) {
    run.phase = "warming up";
  },
  warmup_end(run, event, utc) {
    run.note(utc, "warm-up", `${event.num_steps} steps in ${text.seconds(event.seconds)}`);
  },
  resume(run, event, utc) {
    run.before = event.train_time_s;
    run.origin = event.tokens_seen;
    run.note(utc, "resume", `from ${event.run_id}, after ${text.whole(event.step)} steps and ${text.seconds(event.train_time_s)}`);
  },
  clock_start(run, _event, utc) {
    run.phase = "training";
    run.note(utc, "clock", "started");
  },
  step: (run, event) => run.step(event),
  stage_change(run, event, utc) {
    run.note(utc, "stage", `from step ${text.whole(event.step)}: stage ${event.stage}; ${said(event.inputs ?? {})}`);
  },
  clock_pause(run, event, utc) {
    run.phase = event.reason;
    run.pauses += 1;
    run.note(utc, "clock", `paused at ${text.seconds(event.train_time_s)}: ${event.reason}`);
  },
  val: (run, event, utc) => run.val(event, utc),
  clock_resume(run) {
    run.phase = "training";
  },
  clock_stop(run, event, utc) {
    run.phase = "last validation";
    run.note(utc, "clock", `stopped at ${text.seconds(event.train_time_s)}`);
  },
  checkpoint(run, event, utc) {
    run.note(utc, "checkpoint", `before step ${text.whole(event.step)}; held up for ${text.seconds(event.seconds)}`);
  },
  warning: (run, event, utc) => run.note(utc, "warning", event.message),
  error(run, event, utc) {
    run.error = event;
    run.note(utc, "error", `${event.kind}: ${event.message}`);
  },
  run_end(run, event, utc) {
    run.end = event;
    run.note(utc, "end", `${event.status}; training ${text.seconds(event.train_time_s)}, in all ${text.seconds(event.cold_wall_s)}`);
  },
};
