/** The overview: what is wrong, the runs with their rates, the open groups that close next, the engines. */

import { to } from "./address.mjs";
import { get } from "./api.mjs";
import { h } from "./h.mjs";
import { counted, counts, duration, facts, findings, link, number, section, size, table } from "./widgets.mjs";

const WATCHED_S = 30;
const SOON_FULL_S = 86_400;

export const overview = {
  path: "/",
  title: () => "Overview",
  command: () => "forebay status",
  every: (data) => (data.runs.some((run) => !run.has_ended) ? 2000 : 10_000),
  said: (data) => (data.sentences.length ? `${counted(data.sentences.length, "finding")}: ${data.sentences[0].text}` : "Nothing is wrong"),

  async load({ signal }, previous) {
    const data = await get("/v1/overview", {}, signal);
    data.first = previous?.first ?? data;
    data.rates = rates(data, previous);
    data.sentences = [...data.findings, ...diskFindings(data)];
    return data;
  },

  render(data) {
    const { storage } = data;
    return [
      findings(data.sentences.map(sentence), "Nothing is wrong."),
      section("Runs", table(`${counted(data.num_runs, "run")}, newest first`, runColumns(data.rates), data.runs,
        (run) => run.run_id, "No run yet. Start one: forebay start --help")),
      section("Open groups that close next", table("By the time left to them", groupColumns, data.open_groups,
        (group) => `${group.run_id}/${group.group_id}`, "No group is open.")),
      section("Engines", table("Of the runs that work", engineColumns, data.engines, (row) => `${row.run_id} ${row.url}`,
        "No run calls an engine now.")),
      section("Storage", facts([
        ["journal", `${size(storage.num_bytes)} in ${counted(storage.num_segments, "segment")}`],
        ["free on its disk", storage.num_free_bytes === null ? null : size(storage.num_free_bytes)],
        ["where", storage.location],
      ])),
    ];
  },
};

function sentence({ text, run_id }) {
  return run_id === null ? text : link(to("/runs/:run", { run: run_id }), text);
}

const OUTCOMES = ["member", "failed", "late", "surplus"];
const taken = (run) => OUTCOMES.reduce((sum, outcome) => sum + (run.samples[outcome] ?? 0), 0);

/** Samples a second of each run since the previous reply. */
function rates(data, previous) {
  const before = new Map(previous?.runs.map((run) => [run.run_id, run]));
  const passed = data.now_s - (previous?.now_s ?? data.now_s);
  // Replies of the same second are the same bytes.
  if (previous && passed === 0) return previous.rates;
  return Object.fromEntries(data.runs.filter((run) => before.has(run.run_id))
    .map((run) => [run.run_id, (taken(run) - taken(before.get(run.run_id))) / passed]));
}

/** When the disk will be full, at the rate since the page was opened. */
function diskFindings({ storage, now_s, first }) {
  const passed = now_s - first.now_s;
  const written = storage.num_bytes - first.storage.num_bytes;
  if (storage.num_free_bytes === null || passed < WATCHED_S || written <= 0) return [];
  const left = storage.num_free_bytes / (written / passed);
  if (left > SOON_FULL_S) return [];
  return [{ text: `the disk is full in ${duration(left)} at ${size(written / passed)}/s`, run_id: null }];
}

function state(run) {
  const notes = [["is_stalled", "no progress"], ["is_waiting_for_engine", "waits for its engine"],
    ["is_held", "paused until new weights"], ["is_paused", "engines paused"], ["has_ended", "ended"]];
  const words = [run.state, ...notes.filter(([name]) => run[name]).map(([, word]) => word)].join(", ");
  return h("span", run.is_stalled || run.alarm || run.state === "failed" ? { class: "bad" } : null, words);
}

const runColumns = (rates) => [
  ["run", (run) => link(to("/runs/:run", { run: run.run_id }), run.name ? `${run.name} (${run.run_id})` : run.run_id)],
  ["state", state],
  ["samples/s", (run) => number(rates[run.run_id], 1), "number"],
  ["samples", (run) => number(taken(run)), "number"],
  ["reward", (run) => number(run.rewards.mean), "number"],
  ["open", (run) => number(run.groups.open), "number"],
  ["ready", (run) => number(run.groups.ready), "number"],
  ["delivered", (run) => number(run.groups.leased + run.groups.acked), "number"],
  ["discarded", (run) => counts(run.discarded)],
  ["failed rollouts", (run) => number(run.samples.failed ?? 0), "number"],
  ["weights", (run) => number(run.weight_version), "number"],
];

const groupColumns = [
  ["group", (group) => link(to("/runs/:run/groups/:group", { run: group.run_id, group: group.group_id }), group.group_id)],
  ["instance", (group) => `${group.instance_id} (epoch ${group.epoch})`],
  ["run", (group) => group.run_id],
  ["samples", (group) => number(group.num_samples), "number"],
  ["failed", (group) => number(group.num_failed), "number"],
  ["age", (group) => duration(group.age_s), "number"],
  ["time left", (group) => (group.is_idle ? "paused: no rollout in flight" : duration(group.left_s)), "number"],
];

export const engineColumns = [
  ["engine", (row) => row.url],
  ["run", (row) => row.run_id],
  ["running", (row) => number(row.num_running), "number"],
  ["queued", (row) => number(row.num_waiting), "number"],
  ["weights", (row) => (row.answers ? (row.weight_version ?? "–") : h("span", { class: "bad" }, "does not answer"))],
];
