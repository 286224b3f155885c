/** Formats numbers and times, and makes elements. Their content is text: names and log lines are never markup. */

const LONG = new Intl.NumberFormat("en-US");

export const whole = (n) => LONG.format(Math.round(n));

export function short(n) {
  if (!Number.isFinite(n)) return "–";
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(n) >= size) return `${+(n / size).toPrecision(3)} ${unit}`;
  return `${+n.toPrecision(3)}`;
}

export const loss = (n) => (Number.isFinite(n) ? n.toFixed(4) : "–");

export const ms = (n) => (Number.isFinite(n) ? (n < 100 ? n.toFixed(1) : whole(n)) + " ms" : "–");

export function bytes(n) {
  if (!(n > 0)) return "–";
  for (const [power, unit] of [[30, "GiB"], [20, "MiB"], [10, "KiB"]])
    if (n >= 2 ** power) return `${n >= 1000 * 2 ** power ? whole(n / 2 ** power) : (n / 2 ** power).toPrecision(3)} ${unit}`;
  return `${n} B`;
}

export function seconds(s) {
  if (!Number.isFinite(s)) return "–";
  if (s < 120) return `${s.toFixed(s < 10 ? 2 : 1)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min ${whole(s % 60)} s`.replace("60 s", "59 s");
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** An element with a class and children, which are elements or text. */
export function make(tag, name = "", ...children) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Replace only those children that changed: the others keep focus and scroll position. */
export function fill(host, children) {
  children.forEach((child, at) => {
    const old = host.children[at];
    if (!old) host.append(child);
    else if (!old.isEqualNode(child)) old.replaceWith(child);
  });
  while (host.children.length > children.length) host.lastElementChild.remove();
}

function svg(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export function swatch(dash, colour, marker = "") {
  const places = marker ? { cx: 13, cy: 5, r: 3.5, fill: "none" } : { x1: 0, x2: 26, y1: 5, y2: 5 };
  const shape = svg(marker ? "circle" : "line", { ...places, "stroke-width": 2, "stroke-dasharray": dash.join(" ") });
  shape.style.setProperty("stroke", `var(${colour})`);
  const mark = svg("svg", { class: "swatch", width: 26, height: 10, "aria-hidden": true });
  mark.append(shape);
  return mark;
}
