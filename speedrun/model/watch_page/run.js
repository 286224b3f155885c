/** A run, from the lines of its log. The server validates them, and sends null for an invalid one. */

import * as text from "./text.js";

const LOUD = { warning: "odd", error: "bad" };
const KEPT = 400; // events that are shown

/** The field that keeps an event, the phase that it begins, and its title and text. */
const FIELDS = { run_start: "start", preflight: "preflight", data: "data", plan: "plan", islands: "islands", error: "error", run_end: "end" };
const PHASES = {
  run_start: "checking the machine", preflight: "compiling", compile: "compiling", warmup_start: "warming up",
  clock_start: "training", step: "training", clock_resume: "training", clock_stop: "last validation",
};
const list = (object) => Object.entries(object ?? {}).map(([name, value]) => `${name} ${value}`).join(", ");
const refused = (works) => works.filter((work) => work.refused);
const answers = (works) => [`${works.length} answers`, ...refused(works).map((work) => `${work.island} refused: ${work.refused}`)].join("; ");
const SAID = {
  run_start: (event) => ["start", `${event.recipe} on ${event.track}, seed ${event.seed}`],
  preflight: (event) => ["machine", `${event.num_devices} × ${event.device_kind}, ${text.short(event.matmul_gflops * 1e9)}FLOP/s measured`],
  plan: (event) => ["plan", `${text.short(event.num_params)} parameters, ${text.short(event.total_tokens)} tokens`],
  compile: ({ name, seconds, cache }) => ["compile", `${name} in ${text.seconds(seconds)}${cache && cache !== "off" ? `, cache ${cache}` : ""}`],
  warmup_end: (event) => ["warm-up", `${event.num_steps} steps in ${text.seconds(event.seconds)}`],
  resume: (event) => ["resume", `from ${event.run_id}, after ${text.whole(event.step)} steps and ${text.seconds(event.train_time_s)}`],
  clock_start: () => ["clock", "started"],
  stage_change: (event) => ["stage", `from step ${text.whole(event.step)}: stage ${event.stage}; ${list(event.inputs)}`],
  clock_pause: (event) => ["clock", `paused at ${text.seconds(event.train_time_s)}: ${event.reason}`],
  val: ({ step, loss, seconds }) => ["validation", `step ${text.whole(step)}: loss ${text.loss(loss)}, in ${text.seconds(seconds)} with the clock stopped`],
  clock_stop: (event) => ["clock", `stopped at ${text.seconds(event.train_time_s)}`],
  checkpoint: (event) => ["checkpoint", `before step ${text.whole(event.step)}; took ${text.seconds(event.seconds)}`],
  islands: (event) => ["islands", `${event.islands}, rounds of ${event.every} steps, at least ${event.quorum} answers`],
  island: ({ island, version, why }) => ["island", `${island}: ${why || "joined"}, after round ${version}`],
  round: ({ version, works, digest }) => ["round", `${version + 1}: ${digest ? "" : "does not count; "}${answers(works)}`],
  warning: (event) => ["warning", event.message],
  error: (event) => ["error", `${event.kind}: ${event.message}`],
  run_end: (event) => ["end", `${event.status}; training ${text.seconds(event.train_time_s)}, in all ${text.seconds(event.cold_wall_s)}`],
};

export class Run {
  constructor(file) {
    this.file = file;
    this.clear();
  }

  clear() {
    Object.assign(this, { start: null, preflight: null, data: null, plan: null, islands: null, end: null, error: null });
    Object.assign(this, { isles: new Map(), rounds: 0, refused: 0, exchanged: 0 });
    Object.assign(this, { steps: [], time: [], loss: [], tokens: [], ms: [], vals: [], events: [], inputs: new Map() });
    Object.assign(this, { unread: 0, last: null, phase: "waiting for the first line", before: 0, origin: 0 });
  }

  get name() {
    return this.start?.run_id ?? (this.file.run || this.file.record);
  }

  get numSteps() {
    return this.start?.num_steps ?? 0;
  }

  /** Finished steps, including those before a resumption. */
  get done() {
    return this.steps.length ? this.steps.at(-1) + 1 : 0;
  }

  read(lines, anew) {
    if (anew) {
      const isOther = this.first && this.first !== lines[0]; // or the page reconnected
      this.clear();
      this.first = lines[0];
      if (isOther) this.note("", "log", "another log replaced it");
    }
    for (const raw of lines) {
      if (raw === null) this.unread += 1;
      else this.take(JSON.parse(raw));
    }
  }

  note(utc, kind, said) {
    this.events.push({ utc, kind, said, level: LOUD[kind] ?? "" });
    if (this.events.length > 2 * KEPT) this.events.splice(0, KEPT);
  }

  take({ event, t_utc: utc }) {
    const { ev } = event;
    this.last = utc;
    this.phase = ev === "clock_pause" ? event.reason : (PHASES[ev] ?? this.phase);
    if (ev in FIELDS) this[FIELDS[ev]] = event;
    if (ev in SAID) this.note(utc, ...SAID[ev](event));
    if (ev === "step") this.step(event);
    if (ev === "island") event.why ? this.isles.delete(event.island) : this.isles.set(event.island, event.version);
    if (ev === "round") this.round(event);
    if (ev === "resume") Object.assign(this, { before: event.train_time_s, origin: event.tokens_seen });
    const { step, loss } = event, tokens = this.tokens.at(-1) ?? this.origin;
    if (ev === "val") this.vals.push({ step, loss, tokens, time: this.before });
  }

  step(event) {
    this.steps.push(event.step);
    this.time.push(event.train_time_s);
    this.tokens.push(event.tokens_seen);
    this.loss.push(event.loss);
    this.ms.push((event.train_time_s - this.before) * 1000);
    this.before = event.train_time_s;
    for (const [name, value] of Object.entries(event.inputs ?? {})) {
      if (!this.inputs.has(name)) this.inputs.set(name, { at: [], value: [] });
      const input = this.inputs.get(name);
      input.at.push(event.step);
      input.value.push(Number(value));
    }
  }

  round({ version, works, digest, num_bytes: size }) {
    this.rounds += digest ? 1 : 0;
    this.refused += refused(works).length;
    this.exchanged += size;
    for (const { island } of works) this.isles.set(island, version);
  }

  get status() {
    if (this.end) return this.end.status === "finished" ? "finished" : "crashed";
    if (this.error) return "crashed";
    return this.last ? "running" : "waiting";
  }
}
