/** The thread of a tab, which also trains while that is hidden. Tabs of one browser train in rounds, as islands do: each
 * on a lease of batches with its own optimiser; the first tab takes the mean of their weights by tokens. A lock of each tab
 * tells when it closes, another one which tab is first. All tabs hear all messages: join, order, answer. */
import { drawn } from "./model.js";
import { Trainer } from "./trainer.js";

const EVERY = 10; // steps of a round, and batches of a lease
const me = crypto.randomUUID?.();
const others = new Map(); // of the first tab: what ends when a tab closes, by tab
const awaited = new Map(); // of the first tab: what takes a tab's answer
const over = Promise.withResolvers();
let trainer, channel, nameOf; // nameOf: of a lock
let order = { step: 0, next: 0, leases: {}, returned: [], losses: [], events: [] };
let turn = Promise.resolve(); // orders are obeyed one by one

function take(one, own = []) {
  order = one;
  postMessage({ order: { ...order, params: null }, own, me, device: trainer.device });
}

function mean(answers) {
  const tokens = answers.reduce((sum, one) => sum + one.tokens, 0);
  const of = (lists) => lists[0].map((_, k) => lists.reduce((sum, xs, i) => sum + (answers[i].tokens / tokens) * xs[k], 0));
  return [of(answers.map((one) => one.losses)), answers[0].params.map((_, i) => of(answers.map((one) => one.params[i])))];
}

/** Train on this tab's lease of an order. */
async function work(one) {
  const { num_sequences: B, seq_len: T } = trainer.facts, losses = [];
  trainer.put(one.params);
  while (losses.length < EVERY) {
    losses.push(await trainer.step(one.step + losses.length, one.leases[me] + losses.length));
    take(one, losses);
    await drawn(); // messages are heard
  }
  const params = await Promise.all(trainer.params.map((x) => x.ref.data()));
  return { key: one.key, from: me, tokens: EVERY * B * T, losses, params };
}

async function obey(one) {
  if (one.key === order.key) return;
  if (one.first !== order.first) channel.postMessage({ join: me });
  take(one);
  if (me in one.leases) channel.postMessage({ answer: await work(one) });
  if (one.step === trainer.facts.num_steps) over.resolve();
}

function hear({ data: { join, order: one, answer } }) {
  if (one) turn = turn.then(() => obey(one)).catch(over.reject);
  if (answer && answer.key === order.key) awaited.get(answer.from)?.(answer);
  if (!join || order.first !== me || others.has(join)) return;
  others.set(join, navigator.locks.request(nameOf(join), () => void others.delete(join)));
  channel.postMessage({ order });
}

/** Be the first tab. An heir repeats the round that it heard of last, from the same weights. */
async function lead() {
  await turn;
  let { step, next, losses, params } = order;
  const events = [...order.events], returned = [...order.returned, ...Object.values(order.leases)];
  if (returned.length) events.push(`Step ${step}: the first tab closed; the next one repeats its round.`);
  while (step < trainer.facts.num_steps) {
    const ids = [me, ...others.keys()], leases = {};
    for (const id of ids) [leases[id], next] = returned.length ? [returned.shift(), next] : [next, next + EVERY];
    const answer = (id) => new Promise((resolve) => awaited.set(id, resolve));
    const answers = ids.slice(1).map((id) => Promise.race([answer(id), others.get(id)])); // nothing if it closes
    take({ key: crypto.randomUUID(), first: me, step, next, returned: [...returned], leases, losses, events, params });
    channel.postMessage({ order });
    const found = await Promise.all([work(order), ...answers]);
    const left = ids.filter((_, i) => !found[i]).map((id) => leases[id]);
    returned.push(...left);
    events.push(...left.map((lease) => `Step ${step}: a tab closed; batches ${lease} to ${lease + EVERY - 1} go to another.`));
    const [more, mixed] = mean(found.filter(Boolean));
    [step, losses, params] = [step + EVERY, [...losses, ...more], mixed];
  }
  take({ ...order, key: crypto.randomUUID(), step, losses, events, params, leases: {} });
  channel.postMessage({ order });
  over.resolve();
  await Promise.all(others.values()); // they have heard the end, so none of them leads
}

/** Take part until all steps are done. */
async function train(preset, device) {
  if (!navigator.locks) throw new Error("Training needs https, or an address of this machine.");
  trainer = await Trainer.load(preset, device);
  order.params = trainer.first.map(({ data }) => data);
  nameOf = (who) => `speedrun demo ${preset} ${who}`;
  channel = new BroadcastChannel(nameOf("all"));
  channel.onmessage = hear;
  const waits = new AbortController();
  navigator.locks.request(nameOf(me), () => (channel.postMessage({ join: me }), over.promise));
  navigator.locks.request(nameOf("first"), { signal: waits.signal }, lead).catch(over.reject);
  await over.promise;
  waits.abort();
  channel.close();
  trainer.put(order.params);
  for await (const text of trainer.continued("The run", 240, { temperature: 0.6, topK: 0 })) postMessage({ text });
  postMessage({ end: "Done." });
}

onmessage = ({ data: { preset, device } }) =>
  train(preset, device).catch((error) => postMessage({ end: `Stopped. ${error.message ?? error}` }));
