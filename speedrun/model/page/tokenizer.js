/** Byte-level BPE: text to ids and back. It splits text into words as GPT-2 does. */

// \s of JavaScript differs from White_Space, which other implementations use.
const WORDS = new RegExp(
  "'(?:[sdmt]|ll|ve|re)| ?\\p{L}+| ?\\p{N}+| ?[^\\p{White_Space}\\p{L}\\p{N}]+" +
    "|\\p{White_Space}+(?!\\P{White_Space})|\\p{White_Space}+",
  "gu",
);
const UTF8 = new TextEncoder();

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));

export class Tokenizer {
  /** `tokens`: the bytes of each id in base64; `merges`: [left, right, merged] in order. */
  constructor({ tokens, merges }) {
    this.bytes = tokens.map(bytesOf);
    this.single = new Map();
    this.bytes.forEach((bytes, id) => bytes.length === 1 && this.single.set(bytes[0], id));
    this.merges = new Map(merges.map(([left, right, merged], rank) => [`${left} ${right}`, [rank, merged]]));
  }

  encode(text) {
    return [...text.toWellFormed().matchAll(WORDS)].flatMap(([word]) => this.#word(word));
  }

  #word(word) {
    const ids = Array.from(UTF8.encode(word), (byte) => this.single.get(byte));
    for (;;) {
      let best = [Infinity];
      let at = -1;
      for (let i = 0; i + 1 < ids.length; i++) {
        const found = this.merges.get(`${ids[i]} ${ids[i + 1]}`);
        if (found && found[0] < best[0]) [best, at] = [found, i];
      }
      if (at < 0) return ids;
      ids.splice(at, 2, best[1]);
    }
  }

  /** The text of each id. A character of several ids is with the last one. */
  decode(ids) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const texts = ids.map((id, i) =>
      decoder.decode(this.bytes[id] ?? new Uint8Array(), { stream: i + 1 < ids.length }),
    );
    // A model may write characters that hide text or change its direction.
    return texts.map((text) => text.replace(/[^\P{C}\n\t]|[^\P{Z} ]/gu, "\ufffd"));
  }
}
