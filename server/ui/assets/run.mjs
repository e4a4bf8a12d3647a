/** A run over its steps: reward, length, staleness, discards; the groups of one batch; another run beside it. */

import { to, withFilters } from "./address.mjs";
import { get, route } from "./api.mjs";
import { chart } from "./chart.mjs";
import { h } from "./h.mjs";
import { engineColumns } from "./overview.mjs";
import { text } from "./text.mjs";
import { counted, counts, duration, facts, filter, findings, link, number, quoted, section, table } from "./widgets.mjs";

const PAGE = 20;
const GROUPS_EVERY_MS = 15_000;
const GROUPS_A_PAGE = 100;
const MOST_BATCHES = 2000;
/** Batches whose state may still change are asked for again. */
const CHANGING = 4;
const NOT_DRAWN = new Set(["released", "revoked"]);
const GROUP_STATES = ["discarded", "open", "ready", "leased", "acked"];

export const run = {
  path: "/runs/:run",
  charts: true,
  title: ({ run }) => run,
  command: ({ run }) => `forebay status ${quoted(run)}`,
  every: (data) => (data.run.has_ended ? 15_000 : 2000),
  said: ({ run, batches }) => `${run.state}, ${counted(batches.length, "batch")}, reward ${number(run.rewards.mean)}`,

  async load({ params, filters, signal }, previous) {
    const own = await followed(params.run, previous, signal);
    const other = filters.compare ? await followed(filters.compare, before(previous, filters.compare), signal) : null;
    const listing = await listed(params.run, filters, own.run, previous?.listing, signal);
    return { ...own, other, listing };
  },

  render(data, { params, filters }) {
    const shown = [data, ...(data.other ? [data.other] : [])];
    return [
      findings(data.findings, "Nothing is wrong with this run."),
      h("p", null, link(to("/runs/:run/search", params), "Search what models and tools wrote")),
      facts(runFacts(data)),
      section("Over the steps", compareWith(data, params, filters), progress(data), charts(shown), batchTable(data)),
      groupSection(data, params, filters),
      section("Open groups that close next", table("By the time left to them", openColumns(params), data.open_groups,
        (group) => group.group_id, "No group is open.")),
      section("Engines", table("Of this run", engineColumns, data.engines, (row) => row.url, "The run calls no engine now.")),
    ];
  },
};

function before(previous, runId) {
  return previous?.other?.run.run_id === runId ? previous.other : null;
}

/** A run's state and its newest batches, then those before them, a page a time: no reply becomes large. */
async function followed(runId, previous, signal) {
  const known = previous?.batches ?? [];
  const newest = known.at(-1)?.number ?? 0;
  const after = known.length ? Math.max(0, newest - CHANGING) : undefined;
  const reply = await get(route`/v1/runs/${runId}/history`, { after, limit: PAGE }, signal);
  let found = merged(known, reply.batches);
  const first = found[0]?.number ?? 1;
  if (first > 1 && found.length < MOST_BATCHES) {
    const span = { after: Math.max(0, first - 1 - PAGE), limit: Math.min(PAGE, first - 1) };
    found = merged(found, (await get(route`/v1/runs/${runId}/history`, span, signal)).batches);
  }
  return { ...reply, batches: found };
}

function merged(known, more) {
  const byNumber = new Map([...known, ...more].map((batch) => [batch.number, batch]));
  return [...byNumber.values()].sort((a, b) => a.number - b.number);
}

/** What is asked for less often: the groups of the batch or state that the address names, hundreds; the run; all runs. */
async function listed(runId, filters, view, previous, signal) {
  const state = filters.state ?? (view.groups.discarded ? "discarded" : "ready");
  const wanted = filters.batch ? { batch: filters.batch, limit: 1000 } : { state, after: filters.after, limit: GROUPS_A_PAGE, newest: true };
  const key = JSON.stringify(wanted);
  if (previous?.key === key && Date.now() - previous.at < GROUPS_EVERY_MS) return previous;
  const [{ groups }, whole, { runs }] = await Promise.all([
    get(route`/v1/runs/${runId}/groups`, { ...wanted, samples: true }, signal),
    get(route`/v1/runs/${runId}`, {}, signal), get("/v1/overview", {}, signal),
  ]);
  return { key, at: Date.now(), groups, whole, runs };
}

function runFacts({ run, listing: { whole } }) {
  return [
    ["state", [run.state, run.has_ended ? "ended" : "", run.is_held ? "paused until new weights" : ""].filter(Boolean).join(", ")],
    ["why", ["returned", "stopped", "replayed"].includes(run.reason) ? "" : run.reason],
    ["name", run.name],
    ["generator", whole.generator],
    ["engines", run.engine_urls.join(", ")],
    ["reward", run.rewards.num ? `${number(run.rewards.mean)} (${number(run.rewards.min)} to ${number(run.rewards.max)})` : ""],
    ["groups", counts(run.groups)],
    ["discarded", counts(run.discarded)],
    ["rollouts", counts(run.outcomes)],
    ["weights", run.weight_version],
    ["checkpoints", whole.checkpoints.join(", ")],
    ["active for", duration(run.active_s)],
    ["warnings", whole.warnings.length ? h("ul", null, whole.warnings.map((each) => h("li", null, text(each)))) : ""],
  ];
}

function compareWith(data, params, filters) {
  const others = data.listing.runs.filter((run) => run.run_id !== params.run);
  const options = others.map((run) => [run.run_id, run.name ? `${run.name} (${run.run_id})` : run.run_id]);
  if (filters.compare && !others.some((run) => run.run_id === filters.compare)) options.push([filters.compare, filters.compare]);
  return h("p", { class: "filters" }, filter("compare", "Compare with", filters.compare, [["", "no other run"], ...options]));
}

function progress({ batches, last }) {
  if (!batches.length || batches[0].number === 1 || batches.length >= MOST_BATCHES) return null;
  return h("p", { class: "note" }, `${number(batches.length)} of ${counted(last, "batch")} are loaded so far.`);
}

// --- charts

function charts(runs) {
  if (!runs[0].batches.length) return h("p", { class: "note" }, "No batch was read yet. A trainer reads with client.read_batch().");
  const layout = { xaxis: { title: { text: runs[0].batches.some(hasNoStep) ? "batch" : "step" } } };
  const byTokens = runs.some(({ batches }) => batches.some((batch) => batch.tokens));
  const length = byTokens ? ["Tokens of a rollout", "tokens"] : ["Bytes of a rollout", "bytes"];
  const spread = (title, field) => chart(title, described(title, runs[0], field), runs.flatMap((each, index) => band(each, field, index)), layout, chosen);
  return h("div", { class: "charts" },
    spread("Reward", "rewards"), spread(...length), spread("Staleness, in weight versions", "staleness"),
    chart("Groups discarded before each batch, by reason", counts(total(runs[0].batches)), discards(runs),
      { ...layout, barmode: "stack" }, chosen));
}

const hasNoStep = (batch) => batch.step === null;
const drawn = ({ batches }) => batches.filter((batch) => !NOT_DRAWN.has(batch.state));
const position = (batch) => batch.step ?? batch.number;
const label = ({ run }) => run.name || run.run_id;

function chosen(batch) {
  if (batch) location.hash = withFilters({ batch }).split("#")[1];
}

/** The mean as a line, and the range from lowest to highest as a band. */
function band(each, field, index) {
  const batches = drawn(each).filter((batch) => batch[field]);
  const common = { x: batches.map(position), customdata: index ? [] : batches.map((batch) => batch.batch_id), colour: index };
  const edge = { ...common, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [
    { ...edge, y: batches.map((batch) => batch[field].max) },
    { ...edge, y: batches.map((batch) => batch[field].min), fill: "tonexty" },
    { ...common, y: batches.map((batch) => batch[field].mean), mode: "lines+markers", name: label(each), marker: { size: 6 } },
  ];
}

function discards([own, other]) {
  const batches = drawn(own);
  const common = { x: batches.map(position), customdata: batches.map((batch) => batch.batch_id), type: "bar" };
  const reasons = Object.keys(total(batches));
  const bars = reasons.map((reason, colour) => ({
    ...common, y: batches.map((batch) => batch.discarded[reason] ?? 0), name: reason, colour: colour + 1,
  }));
  if (!other) return bars;
  const sums = drawn(other).map((batch) => Object.values(batch.discarded).reduce((sum, count) => sum + count, 0));
  return [...bars, { x: drawn(other).map(position), y: sums, mode: "lines", name: `all of ${label(other)}`, colour: 0 }];
}

function total(batches) {
  const sums = {};
  for (const { discarded } of batches) for (const [reason, count] of Object.entries(discarded)) sums[reason] = (sums[reason] ?? 0) + count;
  return sums;
}

function described(title, each, field) {
  const means = drawn(each).filter((batch) => batch[field]).map((batch) => batch[field].mean);
  if (!means.length) return `${title}: not known`;
  return `${title} over ${counted(means.length, "batch")}: from ${number(means[0])} to ${number(means.at(-1))}`;
}

// --- tables

function batchTable({ batches }) {
  if (!batches.length) return null;
  const rows = batches.toReversed();
  return h("details", null, h("summary", null, "The batches as a table"),
    table("Newest first", batchColumns, rows, (batch) => batch.batch_id, ""));
}

const mean = (spread) => (spread ? number(spread.mean) : "–");
const range = (spread) => (spread ? `${number(spread.min)} to ${number(spread.max)}` : "–");

const batchColumns = [
  ["batch", (batch) => link(withFilters({ batch: batch.batch_id }), batch.batch_id)],
  ["step", (batch) => number(batch.step), "number"],
  ["state", (batch) => batch.state],
  ["groups", (batch) => number(batch.num_groups), "number"],
  ["rows", (batch) => number(batch.num_rows), "number"],
  ["reward", (batch) => mean(batch.rewards), "number"],
  ["lowest to highest", (batch) => range(batch.rewards), "number"],
  ["tokens", (batch) => mean(batch.tokens), "number"],
  ["bytes", (batch) => mean(batch.bytes), "number"],
  ["staleness", (batch) => mean(batch.staleness), "number"],
  ["discarded before it", (batch) => counts(batch.discarded)],
];

function groupSection(data, params, filters) {
  const chosenBatch = data.batches.find((batch) => batch.batch_id === filters.batch);
  const states = [["", "discarded, else ready"], ...GROUP_STATES.map((state) => [state, state])];
  const what = filters.batch
    ? ["Of batch ", text(filters.batch), chosenBatch?.step == null ? "" : ` (step ${chosenBatch.step})`, ", with those discarded before it. ",
      h("a", { href: withFilters({ batch: "" }) }, "Show groups of all batches")]
    : filters.after
      ? ["Those that opened before ", text(filters.after), ". ", link(withFilters({ after: "" }), `Show the newest ${GROUPS_A_PAGE}`)]
      : `The newest ${GROUPS_A_PAGE} in this state. Click a point above to see the groups of its batch.`;
  const { groups } = data.listing;
  const rows = groups.filter((group) => isWanted(group, filters)).sort((a, b) => gap(b) - gap(a));
  return section("Groups", h("p", null, what),
    h("p", { class: "filters" },
      filters.batch ? null : filter("state", "State", filters.state, states),
      filter("instance", "Instance contains", filters.instance),
      filter("min_reward", "Highest reward at least", filters.min_reward)),
    table("By the spread of their rewards, widest first", groupColumns(params), rows, (group) => group.group_id,
      groups.length ? "No group passes the filters." : "There is no such group."),
    filters.batch || groups.length < GROUPS_A_PAGE ? null
      : link(withFilters({ after: groups.at(-1).group_id }), `Show the next ${GROUPS_A_PAGE}`));
}

const rewards = (group) => group.samples.filter((sample) => sample.fork === 0 && sample.reward !== null).map((sample) => sample.reward);
const gap = (group) => Math.max(0, ...rewards(group)) - Math.min(...rewards(group), Math.max(0, ...rewards(group)));

function isWanted(group, { instance, min_reward }) {
  const best = Math.max(-Infinity, ...rewards(group));
  return (!instance || String(group.instance_id).includes(instance)) && (!min_reward || best >= Number(min_reward));
}

const groupColumns = (params) => [
  ["group", (group) => link(to("/runs/:run/groups/:group", { run: params.run, group: group.group_id }), group.group_id)],
  ["instance", (group) => `${group.instance_id} (epoch ${group.epoch})`],
  ["state", (group) => h("span", group.state === "discarded" ? { class: "bad" } : null, group.state)],
  ["why", (group) => text(group.reason || "–")],
  ["rewards", (group) => rewards(group).map((reward) => number(reward)).join(" · ") || "–"],
  ["failed", (group) => number(group.num_failed), "number"],
  ["forks", (group) => number(group.num_forks), "number"],
];

const openColumns = (params) => [
  ["group", (group) => link(to("/runs/:run/groups/:group", { run: params.run, group: group.group_id }), group.group_id)],
  ["instance", (group) => `${group.instance_id} (epoch ${group.epoch})`],
  ["samples", (group) => number(group.num_samples), "number"],
  ["failed", (group) => number(group.num_failed), "number"],
  ["age", (group) => duration(group.age_s), "number"],
  ["time left", (group) => (group.is_idle ? "paused: no rollout in flight" : duration(group.left_s)), "number"],
];
