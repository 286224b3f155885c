/**
 * Evaluates programs of `page_program.py`: jaxprs, rewritten in the operations below.
 *
 * jax-js counts references: a function consumes its arguments, and `x.ref` adds a reference. So each use of a value but
 * the last takes `.ref`.
 */
import { jit, lax, nn, numpy as np } from "./jax-js/index.js";

/** jax-js 0.1.25 has no sign of integers. */
const sign = (x) => np.sign(x.astype("float32")).astype(x.dtype);

const UNARY = {
  abs: np.abs, ceil: np.ceil, cos: np.cos, erf: lax.erf, erfc: lax.erfc, exp: np.exp, expm1: np.expm1,
  floor: np.floor, log: np.log, log1p: np.log1p, logistic: nn.sigmoid, neg: np.negative, not: np.logicalNot,
  rsqrt: (x) => np.reciprocal(np.sqrt(x)), sign, sin: np.sin, sqrt: np.sqrt,
  stop_gradient: lax.stopGradient, tan: np.tan, tanh: np.tanh,
};
const BINARY = {
  add: np.add, and: np.bitwiseAnd, div: (x, y) => x.div(y), eq: np.equal, ge: np.greaterEqual, gt: np.greater, le: np.lessEqual,
  lt: np.less, max: np.maximum, min: np.minimum, mul: np.multiply, ne: np.notEqual, or: np.bitwiseOr, pow: np.power,
  rem: np.fmod, sub: np.subtract, xor: np.bitwiseXor,
};
const REDUCTIONS = {
  reduce_and: np.all, reduce_max: np.max, reduce_min: np.min, reduce_or: np.any, reduce_sum: np.sum,
};
const each = (table, adapted) => Object.fromEntries(Object.entries(table).map(([name, one]) => [name, adapted(one)]));

/** Combine each entry with all before it, in steps of 1, 2, 4, ... */
function running(x, axis, combine) {
  const length = x.shape[axis];
  const part = (from, to) => x.shape.map((n, i) => (i === axis ? [from, to] : [0, n]));
  for (let step = 1; step < length; step *= 2) {
    const head = x.ref.slice(...part(0, step));
    const before = x.ref.slice(...part(0, length - step));
    const after = x.slice(...part(step, length));
    x = np.concatenate([head, combine(after, before)], axis);
  }
  return x;
}

/** Operations: (operands, parameters, [dtype, shape] of the output). */
const OPERATIONS = {
  ...each(UNARY, (one) => ([x]) => one(x)),
  ...each(BINARY, (one) => ([x, y]) => one(x, y)),
  ...each(REDUCTIONS, (one) => ([x], { axes }) => one(x, axes)),
  broadcast: ([x], { inner, shape }) => np.broadcastTo(x.reshape(inner), shape),
  concatenate: (xs, { axis }) => np.concatenate(xs, axis),
  convert: ([x], _, [dtype]) => x.astype(dtype),
  cummax: ([x], { axis }) => running(x, axis, np.maximum),
  cummin: ([x], { axis }) => running(x, axis, np.minimum),
  cumsum: ([x], { axis }) => running(x, axis, np.add),
  dot: ([x, y], { left, right, batch_left, batch_right }) =>
    lax.dot(x, y, {
      lhsContractingDims: left,
      rhsContractingDims: right,
      lhsBatchDims: batch_left,
      rhsBatchDims: batch_right,
    }),
  iota: (_, { axis }, [dtype, shape]) =>
    np.broadcastTo(np.arange(0, shape[axis], 1, { dtype }).reshape(shape.map((n, i) => (i === axis ? n : 1))), shape),
  pad: ([x, number], { widths }) => // jax-js pads by zeros
    np.where(np.pad(np.ones(x.shape, { dtype: "int32" }), widths).astype("bool"), np.pad(x, widths), number),
  reshape: ([x], { shape }) => x.reshape(shape),
  rows: ([table, indices]) => np.take(table, indices.reshape(indices.shape.slice(0, -1)), 0),
  select_n: ([which, no, yes]) => np.where(which, yes, no),
  slice: ([x], { bounds }) => x.slice(...bounds),
  stack: (xs, { axis }) => np.stack(xs, axis),
  tile: ([x], { reps }) => np.tile(x, reps),
  transpose: ([x], { permutation }) => x.transpose(permutation),
};

export const knows = (name) => Object.hasOwn(OPERATIONS, name);

function literal({ value, dtype }) {
  const number = { inf: Infinity, "-inf": -Infinity, nan: NaN }[value] ?? value;
  return np.array(number, { dtype, shape: [] });
}

/** Count the uses of each value. */
function uses(program) {
  const counts = new Map();
  const count = (x) => typeof x === "number" && counts.set(x, (counts.get(x) ?? 0) + 1);
  program.equations.forEach(([, operands]) => operands.forEach(count));
  program.outputs.forEach(count);
  return counts;
}

/** Evaluate a program on inputs and constants by number, which it consumes. */
function evaluate(program, given, others) {
  const left = uses(program);
  const values = new Map();
  for (const [number, value] of given) left.has(number) ? values.set(number, value) : value.dispose();
  const read = (x) => {
    if (typeof x !== "number") return literal(x);
    const value = values.get(x);
    const remaining = left.get(x) - 1;
    left.set(x, remaining);
    if (remaining) return value.ref;
    values.delete(x);
    return value;
  };
  for (const [name, operands, out, more] of program.equations) {
    values.set(out, (others[name] ?? OPERATIONS[name])(operands.map(read), more, program.values[out]));
  }
  return program.outputs.map(read);
}

/** Compile a program with constants by name: a function that consumes its inputs, and keeps the constants. `others` replace
 * operations; `changed` makes another function of the one from a list of inputs and constants to outputs. */
export function compiled(program, constants, others = {}, changed = (run) => run) {
  const numbers = [...program.inputs, ...Object.keys(program.constants).map(Number)];
  const run = jit(changed((given) => evaluate(program, given.map((x, i) => [numbers[i], x]), others)));
  const names = Object.values(program.constants);
  return (...inputs) => run([...inputs, ...names.map((name) => constants.get(name).ref)]);
}
