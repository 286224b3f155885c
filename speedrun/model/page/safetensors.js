/** Reads safetensors: 8 bytes with the length of the header, the header in JSON, and the bytes of all arrays. */

const ARRAYS = { F32: Float32Array, I32: Int32Array, U32: Uint32Array, BOOL: Uint8Array };
const TYPES = { F32: "float32", I32: "int32", U32: "uint32", BOOL: "bool" };

/** A file or setting that the page cannot use; the page shows the message. */
export class Unusable extends Error {}

function values(type, bytes) {
  const found = new ARRAYS[type](bytes.slice().buffer); // a copy, which is aligned
  return type === "BOOL" ? Int32Array.from(found) : found;
}

/** Read a file as a map from names to {dtype, shape, data}. Throws `Unusable` if it is damaged or not finite. */
export function parse(buffer, file) {
  const refuse = (why) => {
    throw new Unusable(`${file}: ${why}. Export the model again.`);
  };
  if (buffer.byteLength < 8) refuse(`${buffer.byteLength} bytes, too few for a header; it may be cut off`);
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  if (length > buffer.byteLength - 8) {
    refuse(`the header says ${length} bytes, the file has ${buffer.byteLength - 8}; it may be cut off`);
  }
  let header;
  try {
    header = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, 8, length)));
  } catch {
    refuse("the header is not JSON");
  }
  const found = new Map();
  for (const [name, entry] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const { dtype, shape, data_offsets: offsets } = entry ?? {};
    if (!(dtype in ARRAYS)) refuse(`${name} has the type ${dtype}; need ${Object.keys(ARRAYS).join(", ")}`);
    if (!Array.isArray(shape) || !Array.isArray(offsets)) refuse(`${name} has no shape or no offsets`);
    const [from, to] = offsets;
    if (!(from >= 0 && from <= to && to <= buffer.byteLength - 8 - length)) {
      refuse(`${name} lies at ${from} to ${to}, outside the file; it may be cut off`);
    }
    const size = shape.reduce((a, b) => a * b, 1) * ARRAYS[dtype].BYTES_PER_ELEMENT;
    if (to - from !== size) refuse(`${name} has ${to - from} bytes; its shape [${shape}] needs ${size}`);
    const data = values(dtype, new Uint8Array(buffer, 8 + length + from, size));
    if (data instanceof Float32Array && !data.every((x) => Number.isFinite(x) || x === -Infinity)) {
      refuse(`${name} holds a number that is not finite`);
    }
    found.set(name, { dtype: TYPES[dtype], shape, data });
  }
  return found;
}
