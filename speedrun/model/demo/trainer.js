/** Trains a preset of `folder.py`: jax-js differentiates the recipe's loss; the optimiser is the recipe's. */
import { defaultDevice, numpy as np, valueAndGrad } from "./jax-js/index.js";
import { drawn, keyAt } from "./draw.js";
import { compiled } from "./jaxpr.js";
import { array, read, start } from "./model.js";
import { parse } from "./safetensors.js";

const refs = (xs) => xs.map((x) => x.ref);

/** `rows` as a product, whose gradient needs no scatter: jax-js 0.1.25 cannot compile scatters. */
function rowsByProduct([table, indices], _, [, shape]) {
  const places = np.arange(0, table.shape[0], 1, { dtype: "int32" });
  const chosen = np.equal(indices.astype("int32").reshape([-1, 1]), places.reshape([1, -1])).astype("float32");
  return np.matmul(chosen, table).reshape(shape);
}

export class Trainer {
  /** Load a preset. It runs on WebGPU where there is one, else on wasm, or where `asked`. */
  static async load(preset, asked) {
    const device = asked ?? (await start()).at(-1);
    defaultDevice(device);
    const files = [["facts.json", "json"], ["arrays.safetensors", "arrayBuffer"], ["../../text.bin", "arrayBuffer"]];
    const [facts, arrays, text] = await Promise.all(files.map(([name, as]) => read(`presets/${preset}/${name}`, as)));
    return new Trainer(device, facts, parse(arrays, preset), new Uint8Array(text));
  }

  constructor(device, facts, arrays, text) {
    Object.assign(this, { device, facts, text, numParams: facts.first.length });
    const constants = new Map([...arrays].map(([name, one]) => [name, array(one)]));
    const differentiated = (loss) => (given) =>
      valueAndGrad((params) => loss([...params, ...given.slice(this.numParams)])[0])(given.slice(0, this.numParams));
    this.gradient = compiled(facts.loss, constants, { rows: rowsByProduct }, differentiated);
    [this.update, this.logits] = [facts.update, facts.logits].map((program) => compiled(program, constants));
    this.first = facts.first.map((name) => arrays.get(name));
    this.params = facts.first.map((name) => constants.get(name));
    const inputs = facts.update.inputs.map((x) => facts.update.values[x]); // gradients, state, parameters, schedule
    const state = inputs.slice(this.numParams, -this.numParams - facts.schedule.length);
    this.state = state.map(([dtype, shape]) => np.zeros(shape, { dtype }));
  }

  /** Set the parameters, as at first; keep the optimiser's state. */
  put(arrays) {
    for (const one of this.params) one.dispose();
    this.params = arrays.map((data, i) => array({ ...this.first[i], data }));
  }

  /** Take a step of the schedule on a batch, both by number; return the loss before it. */
  async step(step, batch) {
    const { num_sequences: B, seq_len: T, schedule } = this.facts;
    const from = (batch % Math.floor((this.text.length - 1) / (B * T))) * B * T;
    const ids = [from, from + 1].map((at) =>
      np.array(Int32Array.from(this.text.subarray(at, at + B * T)), { shape: [B, T], dtype: "int32" }));
    const row = schedule.map(([dtype, values]) => np.array(values[step], { shape: [], dtype }));
    const [loss, grads] = this.gradient(...refs(this.params), ...ids, ...refs(row));
    const found = this.update(...grads, ...this.state, ...this.params, ...row);
    [this.params, this.state] = [found.slice(0, this.numParams), found.slice(this.numParams)];
    return (await loss.data())[0];
  }

  /** Continue a text by a number of bytes; yields it as it grows. */
  async *continued(prompt, numBytes, how) {
    const ids = [...new TextEncoder().encode(prompt)], T = this.facts.seq_len;
    for (let made = 0; made < numBytes; made++) {
      const seen = Int32Array.from({ length: T }, (_, i) => ids[Math.max(0, ids.length - T) + i] ?? 0);
      const [z] = this.logits(...refs(this.params), np.array(seen, { shape: [1, T], dtype: "int32" }));
      const width = z.shape[1], at = width * (Math.min(ids.length, T) - 1);
      ids.push(drawn((await z.data()).subarray(at, at + width), keyAt(0, [], ids.length), how));
      yield new TextDecoder().decode(Uint8Array.from(ids)).replace(/[^\P{C}\n]/gu, "\ufffd");
    }
  }
}
