/** One group: its fate, its rollouts by reward, where they part, their turns side by side, its instance in time. */

import { to, withFilters } from "./address.mjs";
import { get, route } from "./api.mjs";
import { fateOf, hooksOf, missingSlots } from "./fate.mjs";
import { h } from "./h.mjs";
import { mean, meanReward, prefixTree, turnAt } from "./prefix_tree.mjs";
import { bodyOf, endingOf, nameOf, sorted } from "./samples.mjs";
import { block, plain, text } from "./text.mjs";
import { callsOf, summaryOf, textOf, turnsOf } from "./turns.mjs";
import { counted, duration, facts, link, number, quoted, section, size, table } from "./widgets.mjs";

const BYTES_A_TIME = 4_000_000;
const MOST_BYTES = 256_000_000;
const NUM_TURNS = 20;
const CELL_LENGTH = 600;
const PREVIEW_LENGTH = 80;
export const SAMPLE_PATH = "/runs/:run/groups/:group/samples/:uid";

export const group = {
  path: "/runs/:run/groups/:group",
  title: ({ group }) => `Group ${group}`,
  command: ({ run, group }) => `forebay show ${quoted(run)} ${quoted(group)}`,
  every: (data) => (data.pending.length ? 1 : data.group.state === "open" ? 3000 : 15_000),
  said: (data) => data.fate.text,

  async load({ params, signal }, previous) {
    const data = previous?.pending.length ? previous : await refreshed(params, signal, previous);
    await readBodies(data, params, signal);
    return data;
  },

  render(data, { params, filters }) {
    const { group, run, rollouts } = data;
    const columns = rollouts.filter(({ view, sample }) => !view.fork && sample?.fields);
    return [
      h("p", { class: data.fate.isBad ? "fate bad" : "fate" }, text(data.fate.text)),
      groupFacts(group, run),
      section("Rollouts", table(`${counted(rollouts.length, "sample")}, best reward first`, sampleColumns(params), rollouts,
        ({ view }) => view.uid, "No sample has arrived yet."), slotNotes(group, run), pendingNote(data)),
      section("Where they part", treeOf(rollouts, params)),
      section("Side by side", sideBySide(columns, params, filters)),
      section("What each hook saw", table("In the order of a read", hookColumns, hooksOf(group, run), ({ hook }) => hook),
        group.detail && details("What was recorded of the decision", block(group.detail))),
      section("The same instance", table("In other epochs and steps", epochColumns(params), data.epochs, (row) => row.group_id)),
    ];
  },
};

async function refreshed(params, signal, previous) {
  const at = route`/v1/runs/${params.run}/groups/${params.group}`;
  const [group, { groups }, run] = await Promise.all([
    get(at, {}, signal), get(`${at}/epochs`, {}, signal), get(route`/v1/runs/${params.run}`, {}, signal),
  ]);
  group.step = groups.find(({ group_id }) => group_id === group.group_id)?.step;
  const before = new Map(previous?.rollouts.map((each) => [each.view.uid, each]));
  const rollouts = sorted(group.samples).map((view) => ({ ...before.get(view.uid), view }));
  const pending = rollouts.filter(({ sample, error }) => !sample && !error);
  return { group, run, epochs: groups, rollouts, pending, fate: fateOf(group, run), numBytes: previous?.numBytes ?? 0 };
}

/** Read some of the bodies that are not known: the page shows them as they come. */
async function readBodies(data, { run, group }, signal) {
  const until = data.numBytes + BYTES_A_TIME;
  while (data.pending.length && data.numBytes < until) {
    const [next] = data.pending;
    const isTooMuch = data.numBytes + next.view.num_bytes > MOST_BYTES;
    const found = isTooMuch
      ? { error: `Not loaded: the page holds at most ${size(MOST_BYTES)} of a group.` }
      : await bodyOf(run, group, next.view, signal);
    Object.assign(next, found, found.sample && turnsIn(found.sample));
    data.numBytes += next.view.num_bytes;
    data.pending.shift();
  }
}

function turnsIn({ fields }) {
  const messages = fields?.messages;
  return Array.isArray(messages) ? turnsOf(messages) : { opening: [], turns: [] };
}

function groupFacts(group, run) {
  return facts([
    ["instance", `${group.instance_id} (epoch ${group.epoch})`],
    ["slots with a sample", `${group.num_samples} of ${run.settings.group_size}`],
    ["failed", group.num_failed || null],
    ["forks", group.num_forks || null],
    ["deliveries", group.num_deliveries || null],
    ["weights when delivered or discarded", group.weight_version],
    ["open for", duration((group.closed_s ?? run.active_s) - group.opened_s)],
  ]);
}

function slotNotes(group, run) {
  const slots = missingSlots(group, run);
  return slots.length ? h("p", { class: "note" }, `Without a sample: slot ${slots.join(", ")}.`) : null;
}

function pendingNote({ pending, rollouts }) {
  const numRead = rollouts.length - pending.length;
  return pending.length ? h("p", { class: "note" }, `Reading bodies: ${numRead} of ${rollouts.length} …`) : null;
}

export function sampleLink(params, view, props) {
  return link(to(SAMPLE_PATH, { ...params, uid: view.uid }), nameOf(view), props);
}

const sampleColumns = (params) => [
  ["rollout", ({ view }) => sampleLink(params, view)],
  ["ending", ({ view }) => h("span", view.status === "failed" ? { class: "bad" } : null, text(endingOf(view)))],
  ["reward", ({ view }) => number(view.reward), "number"],
  ["parts of it", ({ view }) => named(view.reward_parts)],
  ["tokens", ({ view, sample }) => number(sample?.tokens?.length ?? view.num_tokens), "number"],
  ["turns", ({ turns }) => number(turns?.length), "number"],
  ["oldest weights", ({ view }) => number(view.oldest_version), "number"],
  ["seconds", ({ sample }) => number(sample?.fields?.extra_info?.timings?.total, 1), "number"],
  ["attempt", ({ sample }) => attemptOf(sample)],
  ["error", ({ view, error, sample }) => errorOf(view) || error || (sample && !sample.fields ? "Its body is not a JSON object." : "")],
];

/** `exact 1, format 0.4`. */
export function named(numbers) {
  return Object.entries(numbers ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

function attemptOf(sample) {
  const attempt = sample?.fields?.attempt;
  return Number.isInteger(attempt) && attempt > 0 ? `${attempt + 1} (retried)` : "1";
}

/** The first line of a failed rollout's error; "" without one. */
export function errorOf({ error }) {
  return error.split("\n")[0];
}

const hookColumns = [
  ["hook", ({ hook }) => hook],
  ["answered by", ({ by }) => by],
  ["was given", ({ saw }) => saw],
];

const epochColumns = ({ run, group }) => [
  ["epoch", (row) => (row.group_id === group
    ? `${row.epoch}, this group`
    : link(to("/runs/:run/groups/:group", { run, group: row.group_id }), `epoch ${row.epoch}`))],
  ["step", (row) => number(row.step), "number"],
  ["state", (row) => (row.reason ? `${row.state}: ${row.reason}` : row.state)],
  ["rewards", (row) => number(row.rewards.length), "number"],
  ["mean reward", (row) => number(mean(row.rewards)), "number"],
  ["weights", (row) => number(row.weight_version), "number"],
];

// --- where they part

function treeOf(rollouts, params) {
  const known = rollouts.filter(({ sample }) => sample?.tokens);
  if (known.length === 0) return h("p", { class: "note" }, "No sample has token ids.");
  const members = known.map((rollout) => ({ ...rollout.sample, reward: rollout.view.reward, rollout }));
  return h("ul", { class: "tree" }, branch(prefixTree(members), null, known.length, params));
}

function branch(node, preview, numAll, params) {
  const { members, branches, start, end } = node;
  const reward = `${members.length > 1 ? "mean reward" : "reward"} ${number(meanReward(members))}`;
  const facts = [`${counted(members.length, "sample")} of ${numAll}`, reward, `${number(end - start)} tokens`].join(" · ");
  return h("li", null,
    preview?.words ? [h("q", null, text(preview.words)), " "] : null,
    preview?.note ? `${preview.note} ` : null,
    h("span", { class: "note" }, facts),
    branches.length ? forked(node, numAll, params) : members.map(({ rollout: { view } }) =>
      [" ", sampleLink(params, view), " ", text(endingOf(view))]));
}

function forked(node, numAll, params) {
  const previews = previewsOf(node);
  return [
    h("p", null, forkText(node, node.members[0].mask)),
    h("ul", null, node.branches.map((each, place) => branch(each, previews[place], numAll, params))),
  ];
}

function forkText(node, mask) {
  const turn = mask ? turnAt(mask, node.end) : 0;
  const where = `Token ${number(node.end)}${turn ? `, turn ${turn}` : ""}: `;
  if (!node.isSampled) return `${where}what the model was given differs`;
  const gap = node.gap === null ? "" : `; their logprobs differ by ${number(node.gap, 2)}`;
  return `${where}the model chose one of ${node.branches.length} ways${gap}`;
}

/** What is written from the fork on, for each branch: the part of the turn's text that they do not share. */
function previewsOf(node) {
  const texts = node.branches.map(({ members: [first] }) => turnText(first, node.end, node.isSampled));
  const [first, ...others] = texts.filter((each) => each !== "");
  let shared = 0;
  while (others.length && shared < first.length && others.every((each) => each[shared] === first[shared])) shared += 1;
  return node.branches.map(({ members: [member], end, start }, place) => {
    const words = texts[place].slice(shared, shared + PREVIEW_LENGTH);
    if (words) return { words };
    return { note: end === start ? "ends here" : `ids ${[...member.tokens.slice(start, start + 8)].join(" ")}` };
  });
}

function turnText({ mask, rollout }, token, isSampled) {
  const { turns } = rollout;
  if (!mask) return "";
  // Answers that were part of the prompt were not sampled.
  const numGiven = turns.length - turnAt(mask, mask.length - 1);
  const turn = turns[turnAt(mask, token) - 1 + numGiven];
  if (!turn) return "";
  return isSampled ? summaryOf(turn.message) : turn.replies.map(textOf).join("\n");
}

// --- side by side

function sideBySide(columns, params, filters) {
  if (columns.length === 0) return h("p", { class: "note" }, "No body can be shown.");
  const numTurns = Math.max(...columns.map(({ turns }) => turns.length));
  const shown = Math.min(numTurns, filters.turns === "all" ? numTurns : NUM_TURNS);
  const rows = Array.from({ length: shown }, (_, turn) => h("tr", null,
    h("th", { scope: "row" }, `turn ${turn + 1}`), columns.map((column) => h("td", null, cell(column, turn)))));
  const heads = columns.map((column) => h("th", { scope: "col" }, columnHead(column, params)));
  const prompts = columns.map((column) => h("td", null, prompt(column)));
  return [
    h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": "Side by side" },
      h("table", { class: "sides" },
        h("thead", null, h("tr", null, h("th", { scope: "col" }, "turn"), heads)),
        h("tbody", null, h("tr", null, h("th", { scope: "row" }, "prompt"), prompts), rows))),
    shown < numTurns ? h("p", null, link(withFilters({ turns: "all" }), `Show all ${numTurns} turns`)) : null,
  ];
}

function columnHead({ view }, params) {
  return [sampleLink(params, view), ` ${view.reward === null ? endingOf(view) : number(view.reward)}`];
}

function prompt({ opening, sample }) {
  if (opening.length) return clipped(textOf(opening.at(-1)));
  const { messages } = sample.fields;
  if (!messages) return "no messages";
  return Array.isArray(messages) ? "" : "messages is not a list";
}

function cell({ turns, sample }, turn) {
  const ended = plain(sample.fields.extra_info?.finish_reason) ?? "no reason given";
  if (turn >= turns.length) return turn === turns.length ? h("span", { class: "note" }, text(`ended: ${ended}`)) : "";
  const { message, replies } = turns[turn];
  return [
    clipped(callsOf(message).length && textOf(message) ? textOf(message) : summaryOf(message)),
    callsOf(message).map(({ name, input }) => details(`call of ${name}`, clipped(input))),
    replies.map((reply) => folded(plain(reply?.role) ?? "reply", textOf(reply))),
  ];
}

function folded(role, words) {
  return details(`${role}, ${number(words.length)} characters`, clipped(words));
}

function clipped(words) {
  return h("div", { class: "words", dir: "auto" }, text(words.slice(0, CELL_LENGTH)), words.length > CELL_LENGTH ? " …" : "");
}

function details(summary, ...children) {
  return h("details", null, h("summary", null, text(summary)), ...children);
}
