/** Loads a model: reads its files, and compiles its programs. */
import { defaultDevice, init, numpy as np } from "./jax-js/index.js";
import * as draw from "./draw.js";
import { compiled, knows } from "./jaxpr.js";
import { parse, Unusable } from "./safetensors.js";
import { Tokenizer } from "./tokenizer.js";

const FORMAT = "speedrun.web/1";
const NUM_TOP = 10; // candidates of a token

export const $ = (id) => document.getElementById(id);

/** An element with properties and children. */
export function made(tag, properties, ...children) {
  const one = Object.assign(document.createElement(tag), properties);
  one.append(...children);
  return one;
}

/** Waits until the browser has drawn. */
export const drawn = () => new Promise((resolve) => setTimeout(resolve, 0));

/** Show an error. */
export function fail(error, status = $("status").textContent) {
  if (!(error instanceof Unusable)) console.error(error);
  $("status").textContent = status;
  $("error").textContent = error instanceof Unusable ? error.message
    : error instanceof RangeError ? "The memory of this page is full. Close other pages, or choose a smaller model."
    : `Unexpected error: ${error.message ?? error}.`;
  $("error").hidden = false;
}

/** Start jax-js; return the names of its backends. */
export async function start() {
  const found = await init("wasm", "webgpu"); // never WebGL, which takes minutes
  defaultDevice("wasm");
  return found.includes("webgpu") ? ["wasm", "webgpu"] : ["wasm"];
}

export async function read(url, as) {
  const reply = await fetch(url).catch(() => {
    throw new Unusable(`${url} cannot be fetched. Is the server running?`);
  });
  if (!reply.ok) throw new Unusable(`${url} is missing (${reply.status}). Export the model again.`);
  try {
    return await reply[as]();
  } catch (error) {
    throw new Unusable(`${url}: ${error instanceof SyntaxError ? "is not JSON" : "was cut off"}. Export the model again.`);
  }
}

export const array = ({ dtype, shape, data }) => np.array(data, { dtype, shape });

export class Model {
  /** Load a model. Refuses other formats, and programs with unknown operations. */
  static async load(folder, device = "wasm") {
    const [facts, raw] = await Promise.all([
      read(`${folder}/model.json`, "json"), read(`${folder}/weights.safetensors`, "arrayBuffer"),
    ]);
    if (facts.format !== FORMAT) {
      throw new Unusable(`${folder}/model.json has the format ${facts.format}; this page reads ${FORMAT}. Export it again.`);
    }
    for (const program of [...facts.states, ...facts.logits]) {
      const unknown = program.equations.find(([name]) => !knows(name));
      if (unknown) throw new Unusable(`${folder}: this page has no operation ${unknown[0]}. Export it again.`);
    }
    const weights = parse(raw, `${folder}/weights.safetensors`);
    const model = new Model();
    model.device = device;
    model.facts = facts;
    model.tokenizer = facts.has_text ? new Tokenizer(await read(`${folder}/tokenizer.json`, "json")) : null;
    defaultDevice(device);
    try {
      const constants = new Map([...weights].map(([name, one]) => [name, array(one)]));
      model.states = facts.states.map((program) => compiled(program, constants));
      model.logits = facts.logits.map((program) => compiled(program, constants));
    } catch (error) {
      if (error instanceof RangeError) throw new Unusable(`${folder}: too large for the memory of this page.`);
      throw error;
    }
    return model;
  }

  /** Ids of a prompt after the token that opens a document. If the track has no text, the prompt lists ids. */
  encode(prompt) {
    const { document_token: opens, vocab_size: size } = this.facts;
    if (this.tokenizer) return [opens, ...this.tokenizer.encode(prompt)];
    const words = prompt.split(/[\s,]+/).filter(Boolean);
    const wrong = words.find((word) => !/^\d+$/.test(word) || Number(word) >= size);
    if (wrong !== undefined) {
      throw new Unusable(`“${wrong}” is no id of ${this.facts.track}, which has 0 to ${size - 1} and no text. Write ids, such as 1, 2, 3.`);
    }
    return words.length ? words.map(Number) : [opens];
  }

  /** The text of each id. */
  decode(ids) {
    return this.tokenizer ? this.tokenizer.decode(ids) : ids.map((id) => `${id} `);
  }

  /** Logits after the positions `from` to the end: an array of Float32Array [V]. */
  async predict(ids, from = 0) {
    const lengths = this.facts.states.map((program) => program.values[program.inputs[0]][1][1]);
    const which = lengths.findIndex((length) => length >= ids.length);
    const padded = new Int32Array(lengths[which]);
    padded.set(ids);
    defaultDevice(this.device);
    const [out] = this.states[which](np.array(padded, { shape: [1, padded.length] }));
    const width = out.shape[1];
    const states = await out.data();
    const found = [];
    while (from < ids.length) {
      const size = from + 1 === ids.length ? 1 : this.facts.logits[1].values[this.facts.logits[1].inputs[0]][1][0];
      const rows = new Float32Array(size * width);
      rows.set(states.subarray(from * width, Math.min(from + size, ids.length) * width));
      const [logits] = this.logits[size === 1 ? 0 : 1](np.array(rows, { shape: [size, width] }));
      const all = await logits.data();
      const number = Math.min(size, ids.length - from);
      for (let i = 0; i < number; i++) found.push(all.slice(i * this.facts.vocab_size, (i + 1) * this.facts.vocab_size));
      from += number;
    }
    return found;
  }

  /**
   * Continue a prompt of ids: yields {id, p, top, isPrompt} for each token, including the prompt. `p` is the probability
   * at temperature 1, and `top` has the most probable tokens, [[id, p], ...]; the first token has neither.
   */
  async *continued(prompt, how, numTokens) {
    if (prompt.length >= this.facts.num_positions) {
      throw new Unusable(`The prompt has ${prompt.length} tokens; the model reads up to ${this.facts.num_positions}, including its own. Shorten the prompt.`);
    }
    const ids = [...prompt];
    const logits = await this.predict(ids);
    yield { id: ids[0], p: null, top: [], isPrompt: true };
    for (let i = 1; i < ids.length; i++) yield { ...seen(logits[i - 1], ids[i]), isPrompt: true };
    let last = logits.at(-1);
    const end = Math.min(this.facts.num_positions, prompt.length + numTokens);
    while (ids.length < end) {
      const id = draw.drawn(last, draw.keyAt(how.seed, prompt, ids.length), how);
      if (id === this.facts.document_token) return;
      ids.push(id);
      yield { ...seen(last, id), isPrompt: false };
      if (ids.length < end) [last] = await this.predict(ids, ids.length - 1);
    }
  }
}

function seen(logits, id) {
  const p = draw.softmax(logits);
  return { id, p: p[id], top: draw.ranked(logits).slice(0, NUM_TOP).map((one) => [one, p[one]]) };
}
