/** Lets one or two models write, and shows the probability of each token. */
import { $, drawn, fail, made, Model, read, start } from "./model.js";

const NONE = "";
const LIMITS = [0.01, 0.1, 0.5, 0.9];
const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.001 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %");
const visible = (text) => (text.trim() ? text : text.replaceAll(" ", "␣")).replaceAll("\n", "↵").replaceAll("\t", "⇥");
const quoted = (text) => `“${visible(text)}”`;

const loaded = new Map(); // by backend and name
let stopped = false;

async function model(name, device) {
  const key = `${device} ${name}`;
  if (!loaded.has(key)) loaded.set(key, await Model.load(`models/${encodeURIComponent(name)}`, device));
  return loaded.get(key);
}

/** The text of a model, and the candidates of the selected token. */
class Column {
  constructor(model, label) {
    const { facts } = model;
    this.spell = (ids) => model.decode(ids);
    const root = $("column").content.cloneNode(true).firstElementChild;
    [this.title, this.text, this.speed, this.heading, this.bars] = root.children;
    this.title.textContent = `${label}, trained on ${facts.track}`;
    this.text.addEventListener("keydown", (event) => this.#move(event));
    $("columns").append(root);
    this.tokens = [];
    this.follows = true; // until the reader selects a token
  }

  add(token, text) {
    const spoken = token.p === null ? `${quoted(text)}, given` : `${quoted(text)}, ${percent(token.p)}`;
    const tabIndex = this.tokens.length ? -1 : 0;
    const one = made("span", { role: "option", ariaLabel: spoken, title: spoken, tabIndex }, text.replaceAll("\n", "↵\n"));
    if (token.isPrompt) one.classList.add("prompt");
    if (token.p !== null) one.classList.add(`p${LIMITS.filter((limit) => token.p >= limit).length}`);
    const index = this.tokens.push({ ...token, text, one }) - 1;
    one.addEventListener("click", () => this.choose(index, true));
    one.addEventListener("focus", () => this.choose(index, true));
    this.text.append(one);
    if (this.follows) this.choose(index);
  }

  choose(index, byReader = false) {
    if (byReader) this.follows = false;
    const { text, p, top, id } = this.tokens[index];
    this.tokens.forEach(({ one }, at) => Object.assign(one, { ariaSelected: at === index, tabIndex: at === index ? 0 : -1 }));
    this.heading.textContent = p === null ? `${quoted(text)} begins the text` : `${quoted(text)}: ${percent(p)}`;
    const rows = top.some(([one]) => one === id) || p === null ? top : [...top, [id, p]];
    this.bars.replaceChildren(...rows.map(([one, share]) => this.#bar(this.spell([one])[0], share, one === id)));
  }

  #bar(text, p, isChosen) {
    const parts = [["of", visible(text)], ["bar", ""], ["p", percent(p)]];
    const cells = parts.map(([className, content]) => made("span", { className }, content));
    cells[1].style.setProperty("--share", `${100 * p}%`);
    return made("li", { className: isChosen ? "chosen" : "" }, ...cells);
  }

  #move(event) {
    const at = this.tokens.findIndex(({ one }) => one === document.activeElement);
    const last = this.tokens.length - 1;
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    this.tokens[Math.min(Math.max(to, 0), last)].one.focus();
  }
}

async function write(name, device, how, numTokens) {
  const one = await model(name, device);
  let column = null; // once there is something to show
  const prompt = one.encode($("prompt").value);
  const ids = [];
  let shown = "";
  let began = 0;
  let number = 0;
  for await (const token of one.continued(prompt, how, numTokens)) {
    ids.push(token.id);
    column ??= new Column(one, name);
    const isFirst = ids.length === 1 && one.facts.has_text && token.id === one.facts.document_token;
    // A character of several tokens appears with the last one.
    const all = one.decode(ids).join("").replace(/\ufffd$/u, "");
    column.add(token, isFirst ? "▸ " : all.slice(shown.length));
    shown = all.startsWith(shown) ? all : shown;
    if (!token.isPrompt) {
      number += 1;
      if (number === 1) began = performance.now(); // without the first, which compiles
      else column.speed.textContent = `${number} tokens, ${((performance.now() - began) / (number - 1)).toFixed(0)} ms each, on ${device}`;
      await drawn();
    }
    if (stopped) break;
  }
  if (!stopped && number < numTokens) {
    const why = prompt.length + number < one.facts.num_positions ? "the model ended the document" : "the model reads no further";
    column.speed.textContent = `${column.speed.textContent || `${number} tokens`}; ${why}`;
  }
}

async function submit(event) {
  event.preventDefault();
  stopped = false;
  $("error").hidden = true;
  $("columns").replaceChildren();
  $("write").disabled = true;
  $("stop").disabled = false;
  const how = {
    temperature: Number($("temperature").value), topK: Number($("top-k").value), seed: Number($("seed").value),
  };
  const names = [$("left").value, $("right").value].filter((name) => name !== NONE);
  try {
    for (const name of names) {
      if (stopped) break;
      $("status").textContent = `${name} writes, on ${$("backend").value}. The first token also waits for compilation.`;
      await drawn();
      await write(name, $("backend").value, how, Number($("tokens").value));
    }
  } catch (error) {
    fail(error);
  }
  $("status").textContent = stopped ? "Stopped." : "Ready.";
  $("write").disabled = false;
  $("stop").disabled = true;
}

async function begin() {
  const backends = await start();
  const names = await read("models.json", "json");
  const { facts } = await model(names[0], backends[0]);
  $("left").replaceChildren(...names.map((name) => new Option(name)));
  $("right").replaceChildren(new Option("none", NONE), ...names.map((name) => new Option(name)));
  $("right").value = names[1] ?? NONE;
  $("beside").hidden = names.length < 2;
  $("backend").replaceChildren(...backends.map((name) => new Option(name)));
  $("backend-label").hidden = backends.length < 2;
  $("prompt-label").textContent = facts.has_text ? "Prompt" : `Prompt: ids from 0 to ${facts.vocab_size - 1}`;
  $("tokens").max = facts.num_positions;
  $("prompt").value = facts.has_text ? "Return the" : "0, 17, 4";
  $("status").textContent = `Ready, on ${backends[0]}.`;
  $("write").disabled = false;
}

$("form").addEventListener("submit", submit);
$("stop").addEventListener("click", () => (stopped = true));
begin().catch((error) => fail(error, "Cannot compute."));
