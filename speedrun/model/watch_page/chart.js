/** A chart on two canvases: curves below, the crosshair above. */

import { make, swatch } from "./text.js";

const LEFT = 60, RIGHT = 10, TOP = 10, BOTTOM = 34;
const STEPS = [1, 2, 5, 10];

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Round values in a range, about `apart` pixels from each other. */
function ticks(low, high, pixels, apart) {
  const most = Math.max(3, Math.floor(pixels / apart));
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * STEPS.find((factor) => power * factor >= rough * 0.999);
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let i = 0; i <= 2 * most && (first + i) * step <= high + step * 1e-9; i++) found.push((first + i) * step);
  return found;
}

/** Index of the value nearest to x; the values are sorted. */
export function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle;
    else high = middle;
  }
  return high < 0 ? -1 : Math.abs(values[low] - x) <= Math.abs(values[high] - x) ? low : high;
}

/** Clear a canvas, resize it to an element, and return its pen. */
function penOf(canvas, { clientWidth: width, clientHeight: height }) {
  const ratio = window.devicePixelRatio || 1;
  const [columns, rows] = [width, height].map((size) => Math.round(size * ratio));
  if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

function rule(pen, from, to) {
  pen.beginPath();
  pen.moveTo(...from);
  pen.lineTo(...to);
  pen.stroke();
}

function dot(pen, x, y) {
  pen.beginPath();
  pen.arc(x, y, 4, 0, 2 * Math.PI);
  pen.fill();
}

/** Converts values to pixels, and back. */
function scale(low, high, from, to) {
  const factor = (to - from) / (high - low || 1);
  return { to: (value) => from + (value - low) * factor, back: (pixel) => low + (pixel - from) / factor };
}

/** Draw a curve. */
function line(pen, one, toX, toY) {
  pen.strokeStyle = colour(one.colour);
  pen.globalAlpha = one.alpha ?? 1;
  pen.lineWidth = one.width ?? 2;
  pen.lineJoin = "round";
  pen.setLineDash(one.dash ?? []);
  pen.beginPath();
  one.x.forEach((x, at) => pen.lineTo(toX.to(x), toY.to(one.y[at]))); // a canvas skips points that are not finite
  pen.stroke();
  pen.setLineDash([]);
  pen.globalAlpha = 1;
}

export class Chart {
  /** `onCursor(x)` is called where the reader points, and with null when they leave. */
  constructor(host, label, onCursor) {
    Object.assign(this, { host, onCursor, below: make("canvas"), above: make("canvas"), model: null, cursor: null });
    this.readout = make("ul", "readout");
    this.readout.hidden = true;
    this.readout.setAttribute("role", "status");
    host.append(this.below, this.above, this.readout);
    host.tabIndex = 0;
    host.setAttribute("role", "img");
    host.setAttribute("aria-label", label);
    new ResizeObserver(() => this.draw()).observe(host);
    for (const name of ["pointermove", "pointerdown"]) host.addEventListener(name, (event) => this.point(event));
    for (const name of ["pointerleave", "blur"]) host.addEventListener(name, () => this.onCursor(null));
    host.addEventListener("keydown", (event) => this.key(event));
  }

  show(model) {
    this.model = model;
    this.draw();
  }

  draw() {
    if (!this.model || !this.host.clientWidth) return;
    const { pen, width, height } = penOf(this.below, this.host);
    const { model } = this;
    const box = (this.box = { left: LEFT, right: width - RIGHT, top: TOP, bottom: height - BOTTOM });
    pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    const [x0, x1, y0, y1] = this.range();
    if (!(x1 > x0)) {
      pen.fillStyle = colour("--grey");
      pen.fillText("no steps yet", LEFT, height / 2);
      this.toX = null;
      return;
    }
    const marks = ticks(y0, y1, box.bottom - box.top, 44).map((value) => [value, model.y.format(value)]);
    box.left = Math.max(LEFT, ...marks.map(([, words]) => pen.measureText(words).width + 12)); // no label is cut
    this.toX = scale(x0, x1, box.left, box.right);
    this.toY = scale(y0, y1, box.bottom, box.top);
    this.axes(pen, x0, x1, marks);
    pen.save();
    pen.beginPath();
    pen.rect(box.left - 4, box.top - 4, box.right - box.left + 8, box.bottom - box.top + 8);
    pen.clip();
    for (const one of model.series) {
      if (one.kind === "line") line(pen, one, this.toX, this.toY);
      else if (one.x.length) this[one.kind](pen, one);
    }
    pen.restore();
    this.target(pen);
    this.crosshair();
  }

  range() {
    let x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    const { series, target, x, y } = this.model;
    for (const one of series)
      for (let i = 0; i < one.x.length; i++) {
        if (!Number.isFinite(one.y[i])) continue;
        x1 = Math.max(x1, one.x[i]);
        y0 = Math.min(y0, one.y[i]);
        y1 = Math.max(y1, one.y[i]);
      }
    this.last = x1 = Math.max(x1, x.last ?? x1);
    if (Number.isFinite(target)) [y0, y1] = [Math.min(y0, target), Math.max(y1, target)];
    y1 = Math.min(y1, y.high ?? y1);
    const room = (y1 - (y.low ?? y0)) * 0.05 || 0.5;
    return [0, x1, y.low ?? y0 - room, y1 + room];
  }

  axes(pen, x0, x1, marks) {
    const { model, box } = this;
    pen.lineWidth = 1;
    pen.strokeStyle = colour("--line");
    pen.fillStyle = colour("--grey");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    for (const [value, words] of marks) {
      const at = Math.round(this.toY.to(value)) + 0.5;
      rule(pen, [box.left, at], [box.right, at]);
      pen.fillText(words, box.left - 8, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    let free = -Infinity;
    for (const value of ticks(x0, x1, box.right - box.left, 80)) {
      const at = this.toX.to(value), words = model.x.format(value);
      const half = pen.measureText(words).width / 2;
      if (at - half < free || at + half > box.right + RIGHT) continue;
      free = at + half + 8;
      pen.fillText(words, at, box.bottom + 6);
    }
    pen.textAlign = "right";
    pen.fillText(model.x.label, box.right, box.bottom + 20);
  }

  target(pen) {
    const { target } = this.model;
    if (!Number.isFinite(target)) return;
    const at = Math.round(this.toY.to(target)) + 0.5;
    pen.strokeStyle = pen.fillStyle = colour("--target");
    pen.lineWidth = 1;
    pen.setLineDash([5, 3]);
    rule(pen, [this.box.left, at], [this.box.right, at]);
    pen.setLineDash([]);
    pen.textAlign = "left";
    pen.textBaseline = "bottom";
    pen.fillText(`target ${target}`, this.box.left + 4, at - 3);
  }

  points(pen, one) {
    pen.lineWidth = 2;
    pen.strokeStyle = colour(one.colour);
    pen.fillStyle = colour("--paper");
    for (let i = 0; i < one.x.length; i++) {
      const px = this.toX.to(one.x[i]), py = this.toY.to(one.y[i]);
      if (!Number.isFinite(px) || !Number.isFinite(py)) continue;
      dot(pen, px, py);
      pen.stroke();
    }
  }

  /** One dot for each step; those above the range are at its top. */
  strip(pen, one) {
    const [usual, slow] = [one.colour, "--target"].map(colour);
    one.y.forEach((value, at) => {
      const isOut = value > one.outlier, size = isOut ? 4 : 2, px = Math.round(this.toX.to(one.x[at]));
      pen.fillStyle = isOut ? slow : usual;
      pen.fillRect(px - size / 2, this.toY.to(Math.min(value, this.model.y.high)) - size / 2, size, size);
    });
  }

  point(event) {
    if (!this.toX) return;
    this.onCursor(this.toX.back(event.clientX - this.host.getBoundingClientRect().left));
  }

  key(event) {
    const lead = this.model?.lead;
    if (!lead?.x.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = lead.x.length - 1, stride = event.shiftKey ? Math.max(1, Math.round(last / 10)) : 1;
    const here = this.cursor === null ? last + 1 : nearest(lead.x, this.cursor);
    const to = { ArrowLeft: here - stride, ArrowRight: here + stride, Home: 0, End: last, Escape: null }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.onCursor(to === null ? null : lead.x[Math.max(0, Math.min(last, to))]);
  }

  setCursor(x) {
    this.cursor = x;
    this.crosshair();
  }

  crosshair() {
    const { pen } = penOf(this.above, this.host);
    const lead = this.model?.lead;
    this.readout.hidden = this.cursor === null || !this.toX || !lead?.x.length;
    if (this.readout.hidden) return;
    const read = [lead, ...this.model.series.filter((one) => one.say && one !== lead && one.x.length)];
    const at = this.toX.to(lead.x[nearest(lead.x, this.cursor)]), middle = Math.round(at) + 0.5;
    pen.strokeStyle = colour("--grey");
    pen.lineWidth = 1;
    rule(pen, [middle, this.box.top], [middle, this.box.bottom]);
    const rows = read.map((one) => {
      const index = nearest(one.x, this.cursor);
      pen.fillStyle = colour(one.colour);
      dot(pen, this.toX.to(one.x[index]), this.toY.to(Math.min(one.y[index], this.model.y.high ?? Infinity)));
      return make("li", "", swatch(one.dash ?? [], one.colour), make("span", "", one.say(index, one === lead)));
    });
    this.readout.replaceChildren(...rows);
    const isRight = at > this.box.left + (this.box.right - this.box.left) * 0.55;
    this.readout.style.setProperty("right", isRight ? "auto" : ".4rem");
    this.readout.style.setProperty("left", isRight ? `${this.box.left + 4}px` : "auto");
  }
}

/** A small curve without axes. */
export function sparkline(canvas, x, y) {
  const { pen, width, height } = penOf(canvas, canvas);
  if (!width || !x.length) return;
  const [low, high] = [Math.min, Math.max].map((further) => y.reduce((a, b) => further(a, b)));
  line(pen, { x, y, colour: "--c0", width: 1.5 }, scale(x[0], x.at(-1), 1, width - 1), scale(low, high, height - 3, 3));
}
