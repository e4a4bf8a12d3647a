/** Search: the samples of a run whose tool messages or last answer contain a text, and what they were rewarded. */

import { to } from "./address.mjs";
import { get, route } from "./api.mjs";
import { SAMPLE_PATH } from "./group.mjs";
import { h } from "./h.mjs";
import { nameOf } from "./samples.mjs";
import { text } from "./text.mjs";
import { counted, filter, link, number, quoted, section, table } from "./widgets.mjs";

const MIN_LENGTH = 3;
const MOST_HITS = 50;
/** A search that took long is repeated after this many times as long: a frequent word costs the server a second. */
const PAUSES = 50;

export const search = {
  path: "/runs/:run/search",
  title: () => "Search",
  command: ({ run }, { text: wanted }) => `forebay show ${quoted(run)} --grep ${quoted(`(?i)${pattern(wanted ?? "")}`)}`,
  every: (data) => (data.is_building ? Math.max(2000, 5 * data.took) : Math.max(10_000, PAUSES * data.took)),
  said: (data) => (data.wanted ? `${counted(data.num_with, "sample")} with the text` : ""),

  async load({ params, filters, signal }) {
    const given = filters.text ?? "";
    const wanted = [...given].length < MIN_LENGTH ? "" : given;
    const asked = { text: wanted, instance: filters.instance, min_reward: filters.min_reward || null, limit: MOST_HITS };
    const began = performance.now();
    const found = await get(route`/v1/runs/${params.run}/search`, asked, signal);
    return { ...found, given, wanted, took: performance.now() - began };
  },

  render(data, { params, filters }) {
    return [
      h("p", { class: "filters" },
        filter("text", "Text", filters.text),
        filter("instance", "Instance contains", filters.instance),
        filter("min_reward", "Reward at least", filters.min_reward)),
      h("p", { class: "note" }, "Searches tool messages and last answers, without regard to the case of A to Z. ", progress(data)),
      data.problem ? h("p", { class: "error" }, text(data.problem)) : null,
      data.given && !data.wanted ? h("p", { class: "note" }, `Enter at least ${MIN_LENGTH} characters.`) : null,
      data.wanted ? section("Samples with the text", h("p", { class: "fate" }, share(data)),
        table(`The newest ${MOST_HITS} at most`, columns(params, data.wanted), data.samples, ({ uid }) => uid, data.is_building ? "No sample searched so far has this text." : "No sample has this text.")) : null,
    ];
  },
};

/** The text as a regular expression of Python. */
const pattern = (words) => words.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&");

function progress({ is_building, is_full, num_searched, num_open_groups, num_unread }) {
  const notes = [
    is_building ? "older ones are being read" : "",
    is_full ? "the index is full, so older ones are left out" : "",
    num_unread ? `${number(num_unread)} bodies are removed or damaged` : "",
    num_open_groups ? `${counted(num_open_groups, "open group")} will be searched when complete` : "",
  ];
  return `${[`${counted(num_searched, "sample")} searched, newest first`, ...notes.filter(Boolean)].join("; ")}.`;
}

function share({ num_with, num_searched, mean_with, mean_without }) {
  const part = num_searched ? ` (${number((100 * num_with) / num_searched, 1)} %)` : "";
  return `In ${number(num_with)} of ${counted(num_searched, "sample")}${part}. ` +
    `Mean reward: ${number(mean_with)} with it, ${number(mean_without)} without it.`;
}

const columns = (params, wanted) => [
  ["rollout", (hit) => link(to(SAMPLE_PATH, { run: params.run, group: hit.group_id, uid: hit.uid }), nameOf(hit))],
  ["group", (hit) => link(to("/runs/:run/groups/:group", { run: params.run, group: hit.group_id }), hit.group_id)],
  ["instance", (hit) => hit.instance_id],
  ["reward", (hit) => number(hit.reward), "number"],
  ["text", ({ excerpt }) => marked(excerpt, wanted)],
];

function marked(excerpt, wanted) {
  const at = lower(excerpt).indexOf(lower(wanted));
  if (at < 0) return text(excerpt);
  const end = at + wanted.length;
  return h("span", { class: "words" }, text(excerpt.slice(0, at)), h("mark", null, text(excerpt.slice(at, end))), text(excerpt.slice(end)));
}

const lower = (words) => words.replace(/[A-Z]/g, (letter) => letter.toLowerCase());
