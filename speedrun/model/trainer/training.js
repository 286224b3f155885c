/** Trains the preset of `speedrun play --recipe`. jax-js differentiates the recipe's loss; the optimiser is the recipe's. */
import { jit, numpy as np, valueAndGrad } from "./jax-js/index.js";
import { rowsByProduct, runner } from "./jaxpr.js";
import { array, opened } from "./model.js";

const FORMAT = "speedrun.web.training/1";
const norm = (xs) => Math.sqrt(xs.reduce((sum, x) => sum + x * x, 0));

/** The norm of the difference, relative to the norm of the expected value. */
export function difference(found, expected) {
  const size = norm(expected);
  const off = norm(found.map((x, i) => x - expected[i]));
  return off === 0 ? 0 : off / size;
}

/**
 * Split a program into the part that does not depend on its first inputs, and is not differentiated, and the rest. Outputs
 * of the former are further inputs of the latter.
 */
function split(program, numInputs) {
  const dependent = new Set(program.inputs.slice(0, numInputs));
  const [after, before, needed] = [[], [], new Set()];
  for (const equation of program.equations) {
    const [, operands, out] = equation;
    const depends = operands.some((x) => dependent.has(x));
    if (depends) dependent.add(out);
    (depends ? after : before).push(equation);
    if (depends) operands.filter((x) => typeof x === "number" && !dependent.has(x)).forEach((x) => needed.add(x));
  }
  const fixed = { ...program, inputs: program.inputs.slice(numInputs), equations: before, outputs: [...needed] };
  const inputs = [...program.inputs.slice(0, numInputs), ...needed];
  return [fixed, { ...program, inputs, constants: {}, equations: after }];
}

export class Trainer {
  static async load(folder) {
    const programs = ({ loss, update }) => [loss, update];
    return new Trainer(...(await opened(folder, "training.json", "arrays.safetensors", FORMAT, programs)));
  }

  constructor(facts, arrays) {
    this.facts = facts;
    this.arrays = arrays;
    const [fixed, rest] = split(facts.loss, facts.params.length);
    const [prepare, loss, update] = [runner(fixed), runner(rest, { rows: rowsByProduct }), runner(facts.update)];
    this.constants = [facts.loss, facts.update].map((one) => Object.values(one.constants).map((name) => array(arrays.get(name))));
    this.gradient = jit((params, batch, constants) => {
      const known = prepare(batch, constants);
      return valueAndGrad((params) => loss([...params, ...known])[0])(params);
    });
    this.update = jit((grads, state, params, row, constants) => {
      const found = update([...grads, ...state, ...params, ...row], constants);
      return [found.slice(0, params.length), found.slice(params.length)];
    });
    this.reset();
  }

  reset() {
    this.step = 0;
    this.#put("first");
  }

  /** Set parameters and optimiser state to those of JAX. */
  #put(when) {
    for (const one of [...(this.params ?? []), ...(this.state ?? [])]) one.dispose();
    this.params = this.facts.params.map((name) => array(this.arrays.get(`${when}.params.${name}`)));
    this.state = Array.from({ length: this.facts.num_state }, (_, i) => array(this.arrays.get(`${when}.state.${i}`)));
  }

  /** Return loss and gradients of a batch, and the scheduled inputs for the update. */
  #differentiate(step) {
    const { num_sequences: B, seq_len: T, schedule } = this.facts;
    const stream = this.arrays.get("tokens").data;
    const [tokens, targets] = [0, 1].map((shift) =>
      np.array(stream.slice(step * B * T + shift, (step + 1) * B * T + shift), { shape: [B, T], dtype: "int32" }));
    const row = schedule.map(({ dtype, values }) => np.array(values[step], { shape: [], dtype }));
    const refs = (xs) => xs.map((x) => x.ref);
    const [loss, grads] = this.gradient(refs(this.params), [tokens, targets, ...refs(row)], refs(this.constants[0]));
    return [loss, grads, row];
  }

  #move(grads, row) {
    [this.params, this.state] = this.update(grads, this.state, this.params, row, this.constants[1].map((x) => x.ref));
  }

  /** Take a step; returns the loss before it. */
  async next() {
    const [loss, grads, row] = this.#differentiate(this.step);
    this.#move(grads, row);
    this.step += 1;
    const [value] = await loss.data();
    return value;
  }

  /** Take a step from JAX's state; return relative differences of the loss, and of each gradient and update. Resets. */
  async compare() {
    const { checked_step: step, losses, params: names } = this.facts;
    const jax = (kind, name) => this.arrays.get(`${kind}.${name}`).data;
    this.#put("before");
    const [loss, grads, row] = this.#differentiate(step);
    const [value] = await loss.data();
    const gradient = {};
    const update = {};
    for (const [i, name] of names.entries()) gradient[name] = difference(await grads[i].ref.data(), jax("grads", name));
    this.#move(grads, row);
    for (const [i, name] of names.entries()) {
      const before = jax("before.params", name);
      const change = (after) => after.map((x, k) => x - before[k]);
      update[name] = difference(change(await this.params[i].ref.data()), change(jax("after.params", name)));
    }
    this.reset();
    return { loss: Math.abs(value - losses[step]) / losses[step], gradient, update };
  }
}
