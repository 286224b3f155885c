/** Reads safetensors: 8 bytes with the length of the header, the header in JSON, and the bytes of all arrays. */

const ARRAYS = { F32: Float32Array, I32: Int32Array, U32: Uint32Array, BOOL: Uint8Array };
const TYPES = { F32: "float32", I32: "int32", U32: "uint32", BOOL: "bool" };

/** A file or setting that the page cannot use; the page shows the message. */
export class Unusable extends Error {}

function values(type, bytes) {
  const found = new ARRAYS[type](bytes.slice().buffer); // a copy, which is aligned
  return type === "BOOL" ? Int32Array.from(found) : found;
}

/** Read a file as a map from names to {dtype, shape, data}. Throws `Unusable` if it is cut off or not finite. */
export function parse(buffer, file) {
  const refuse = (why) => {
    throw new Unusable(`${file}: ${why}. Export the model again.`);
  };
  const need = (size) => size <= buffer.byteLength || refuse(`${buffer.byteLength} bytes of at least ${size}; it is cut off`);
  need(8);
  const begin = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  need(begin);
  const found = new Map();
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, begin - 8)));
  for (const [name, { dtype, shape, data_offsets: [from, to] }] of Object.entries(header)) {
    need(begin + to);
    const data = values(dtype, new Uint8Array(buffer, begin + from, to - from));
    if (data instanceof Float32Array && !data.every((x) => Number.isFinite(x) || x === -Infinity)) {
      refuse(`${name} holds a number that is not finite`);
    }
    found.set(name, { dtype: TYPES[dtype], shape, data });
  }
  return found;
}
