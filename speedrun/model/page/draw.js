/**
 * Draws tokens as `speedrun sample` does: the largest z / temperature - log(-log u), with the uniform numbers of JAX.
 *
 * Threefry: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, used as in JAX.
 */
const ROTATIONS = [[13, 15, 26, 6], [17, 29, 16, 24]];
const TINY = 2 ** -126;

/** Threefry-2x32 of a key and a counter, each two words of 32 bits. */
export function threefry([k0, k1], [x0, x1]) {
  const keys = [k0, k1, k0 ^ k1 ^ 0x1bd11bda];
  x0 = (x0 + keys[0]) >>> 0;
  x1 = (x1 + keys[1]) >>> 0;
  for (let round = 0; round < 5; round++) {
    for (const turn of ROTATIONS[round % 2]) {
      x0 = (x0 + x1) >>> 0;
      x1 = ((x1 << turn) | (x1 >>> (32 - turn))) >>> 0;
      x1 = (x1 ^ x0) >>> 0;
    }
    x0 = (x0 + keys[(round + 1) % 3]) >>> 0;
    x1 = (x1 + keys[(round + 2) % 3] + round + 1) >>> 0;
  }
  return [x0, x1];
}

/** As `jax.random.fold_in`. */
export const foldIn = (key, number) => threefry(key, [0, number >>> 0]);

/** As `jax.random.uniform(key, (size,), minval=tiny)`, float32. */
export function uniforms(key, size) {
  const word = new Uint32Array(1);
  const float = new Float32Array(word.buffer);
  return Float32Array.from({ length: size }, (_, i) => {
    const [a, b] = threefry(key, [0, i]);
    word[0] = ((a ^ b) >>> 9) | 0x3f800000;
    return Math.max(TINY, Math.fround(float[0] - 1 + TINY));
  });
}

/** The random stream of a prompt: CRC-32 of its ids as 32-bit words. */
export function stream(ids) {
  let crc = ~0;
  for (const byte of new Uint8Array(Int32Array.from(ids).buffer)) {
    crc ^= byte;
    for (let bit = 0; bit < 8; bit++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc >>> 0;
}

/** The key of the token at a position. */
export const keyAt = (seed, prompt, position) => foldIn(foldIn([0, seed], stream(prompt)), position);

/** Ids by decreasing logit, then by number. */
export const ranked = (logits) => Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);

export function argmax(xs) {
  let best = 0;
  for (let i = 1; i < xs.length; i++) if (xs[i] > xs[best]) best = i;
  return best;
}

export function softmax(logits, temperature = 1) {
  const top = logits[argmax(logits)];
  const weights = Float64Array.from(logits, (z) => Math.exp((z - top) / temperature));
  const total = weights.reduce((a, b) => a + b, 0);
  return weights.map((x) => x / total);
}

/** Draw an id from the `topK` most probable ones; 0: from all. */
export function drawn(logits, key, { temperature, topK }) {
  if (!(temperature > 0)) return argmax(logits);
  const u = uniforms(key, logits.length);
  const ids = topK > 0 ? ranked(logits).slice(0, topK) : ranked(logits);
  const noisy = ids.map((id) => Math.fround(
    Math.fround(logits[id] / Math.fround(temperature)) - Math.fround(Math.log(-Math.fround(Math.log(u[id])))),
  ));
  return ids[argmax(noisy)];
}
