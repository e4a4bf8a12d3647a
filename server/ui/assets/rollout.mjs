/** One rollout: how it ended, its reward, its turns, and its tokens with the numbers that anyone knows of them. */

import { ApiError, get, getBytes, getLines, route } from "./api.mjs";
import { arrayOf, arraysOf } from "./bodies.mjs";
import { SAMPLE_PATH, errorOf, named, sampleLink } from "./group.mjs";
import { h } from "./h.mjs";
import { imagesOf, picturesOf } from "./pictures.mjs";
import { bodyOf, endingOf, nameOf, sorted } from "./samples.mjs";
import { block, plain, text, visible } from "./text.mjs";
import { coloured, colourings, factsOf } from "./token_colours.mjs";
import { TokenStrip } from "./token_strip.mjs";
import { callsOf, indented, reasoningOf, textOf, turnsOf } from "./turns.mjs";
import { counted, duration, facts, filter, link, number, quoted, section, size, table } from "./widgets.mjs";

const FOLDED_LENGTH = 65_536;
const MOST_NOTES = 1000;
const SHOWN_ELSEWHERE = new Set(["messages", "tokens", "logprobs", "loss_mask", "token_spans"]);

export const rollout = {
  path: SAMPLE_PATH,
  title: ({ uid }) => `Rollout ${uid}`,
  command: ({ run, group }, _, data) =>
    `forebay show ${quoted(run)} ${quoted(group)}${data?.view.slot >= 0 ? ` ${data.view.slot}` : ""}`,
  every: (data) => (data.body.sample?.fields && data.pictures === null ? 1 : 15_000),
  said: (data) => `${nameOf(data.view)}: ${endingOf(data.view)}`,

  async load({ params: { run, group, uid }, filters, signal }, previous) {
    const at = route`/v1/runs/${run}/groups/${group}`;
    const ofRun = route`/v1/runs/${run}`;
    const [found, notes, engines] = await Promise.all([
      get(at, {}, signal), getLines(`${ofRun}/annotations`, { uid, group, limit: MOST_NOTES }, signal),
      previous?.engines ?? get(ofRun, {}, signal).then((view) => view.engine_urls),
    ]);
    const view = found.samples.find((sample) => sample.uid === uid);
    if (!view) throw new ApiError(404, "not_found", `group ${group} has no sample ${uid}`, "The group's page lists its samples.");
    const body = previous?.body ?? (await bodyOf(run, group, view, signal));
    const { values = new Map(), texts = null, pictures = null } = previous ?? {};
    const data = { group: found, view, notes, body, engines, values, texts, pictures };
    const getPart = (digest) => getBytes(`${at}/parts/${encodeURIComponent(digest)}`, {}, signal);
    if (body.sample?.tokens) data.problem = await readValues(data, filters.colour, getPart, signal);
    // The page shows texts and ids at once: images may be large, and the engine may not answer.
    if (!previous || !body.sample?.fields) return data;
    data.pictures ??= await picturesOf([body.sample.fields.messages].flat(), getPart);
    signal.throwIfAborted();
    if (body.sample.tokens) data.texts ??= await tokenTexts(at, uid, engines, signal);
    return data;
  },

  render(data, at) {
    const { view, body } = data;
    return [
      h("p", { class: view.status === "failed" ? "fate bad" : "fate" }, text(fate(view))),
      neighbours(data, at.params),
      section("Reward", reward(data)),
      data.notes.length ? section("What the trainer wrote", notesTable(data.notes)) : null,
      body.error ? h("p", { class: "error" }, text(body.error)) : bodySections(data, at),
    ];
  },
};

function fate(view) {
  const words = `${nameOf(view)}: ${endingOf(view)}`;
  return view.reward === null ? `${words}. It has no reward. ${errorOf(view)}` : `${words}, reward ${number(view.reward)}`;
}

/** The rollouts before and after this one, by reward; its forks are among them. */
function neighbours({ group, view }, params) {
  const all = sorted(group.samples);
  const at = all.findIndex(({ uid }) => uid === view.uid);
  const [before, after] = [all[at - 1], all[at + 1]];
  return h("nav", { "aria-label": "Rollouts of the group" },
    before ? ["Previous: ", sampleLink(params, before, { rel: "prev" }), " "] : null,
    after ? ["Next: ", sampleLink(params, after, { rel: "next" })] : null);
}

function reward({ view, body }) {
  const fields = body.sample?.fields ?? {};
  const { finish_reason: finish, timings } = fields.extra_info ?? {};
  const parts = Object.entries(view.reward_parts ?? {}).map(([name, value]) => [`part ${name}`, number(value)]);
  const judge = { "judge's input": fields.for_reward, "row and sampling": fields.extra_info, label: fields.label };
  return [
    facts([
      ["reward", view.reward === null ? null : number(view.reward)], ...parts,
      ["ending", endingOf(view)], ["finish reason", plain(finish)], ["took", timings ? duration(timings.total) : null],
      ["earlier attempts", plain(fields.attempt || null)], ["oldest weights", view.oldest_version], ["size", size(view.num_bytes)],
    ]),
    view.error ? folded("Error", fields.error?.traceback || view.error, true) : null,
    Object.entries(judge).filter(([, value]) => value !== undefined && value !== null)
      .map(([name, value]) => folded(name, typeof value === "string" ? value : JSON.stringify(value, null, 2))),
  ];
}

const notesTable = (notes) => table(counted(notes.length, "annotation"), [
  ["step", ({ step }) => number(step), "number"],
  ["producer", ({ producer }) => producer],
  ["numbers", ({ values }) => named(values)],
  ["arrays", (note) => Object.keys(note.arrays ?? {}).join(", ")],
], notes, ({ id }) => id);

function bodySections(data, at) {
  const { sample } = data.body;
  const isNone = h("p", { class: "note" }, "It is not a JSON object. This is its text.");
  if (!sample.fields) return section("Body", isNone, folded("Text", sample.raw, true));
  const { messages } = sample.fields;
  const others = Object.fromEntries(Object.entries(sample.fields).filter(([name]) => !SHOWN_ELSEWHERE.has(name)));
  return [
    section("Turns", Array.isArray(messages) ? turns(messages, data.pictures) : folded("messages is not a list", written(messages), true)),
    section("Tokens", sample.tokens ? tokens(data, at) : h("p", { class: "note" }, "This sample has no token ids.")),
    section("Other fields", folded("As written", written(others))),
  ];
}

// --- turns

function turns(messages, pictures) {
  const { opening, turns } = turnsOf(messages);
  const shown = (message) => shownMessage(message, pictures);
  return [
    opening.map(shown),
    turns.map(({ message, replies }, place) => h("section", { key: `turn ${place}`, class: "turn" },
      h("h3", null, `Turn ${place + 1} of ${turns.length}`), shown(message), replies.map(shown))),
  ];
}

function shownMessage(message, pictures) {
  if (message === null || typeof message !== "object") return folded("a message of another form", JSON.stringify(message));
  const role = plain(message.role) ?? "no role";
  const words = textOf(message);
  const thoughts = reasoningOf(message);
  const calls = callsOf(message);
  const isAnswer = role === "assistant" || role === "user";
  return h("div", { class: "message" },
    h("p", { class: "role" }, text(message.name ? `${role} ${plain(message.name)}` : role)),
    thoughts ? folded("Reasoning", thoughts) : null,
    words ? (isAnswer ? long(words) : folded(`${number(words.length)} characters`, indented(words), words.length < 500)) : null,
    imagesOf(message).map(({ url }) => picture(pictures?.get(url))),
    calls.map(({ name, input }) => folded(`Call of ${name}`, input)));
}

function picture(found) {
  if (!found) return null;
  return found.src ? h("img", { src: found.src, alt: "an image of this message" }) : h("p", { class: "note" }, text(`Not shown: ${found.problem}.`));
}

/** A text that is folded only if it is very long. */
function long(words) {
  return words.length > FOLDED_LENGTH ? folded(`${number(words.length)} characters`, words) : block(words);
}

const written = (value) => JSON.stringify(value ?? null, null, 2);

function folded(summary, words, isOpen = false) {
  return h("details", isOpen ? { open: true } : null, h("summary", null, text(summary)), block(words ?? ""));
}

// --- tokens

/** The arrays of one number for each token: `[label, fields]`, of the sample and of its annotations. */
function arraySources({ body, notes }) {
  const own = arraysOf(body.sample.fields).map((name) => ({ label: name, name, fields: body.sample.fields }));
  const labelOf = (name, { producer, step }) => `${name} (${producer}, step ${step})`;
  const noted = notes.flatMap((note) => arraysOf(note).map((name) => ({ label: labelOf(name, note), name, fields: note })));
  return [...own, ...noted];
}

/** Read the array that the tokens are coloured by, if it is not known; what went wrong, in words, else null. */
async function readValues(data, colour, getPart, signal) {
  const source = arraySources(data).find(({ label }) => label === colour);
  if (!source || data.values.has(colour)) return null;
  try {
    data.values.set(colour, await arrayOf(source.fields, source.name, data.body.sample.tokens.length, getPart));
    return null;
  } catch (error) {
    signal.throwIfAborted();
    return `${source.name} cannot be shown: ${error.message}`;
  }
}

/** `{texts}` of the token ids, as the engine of the run decodes them; else `{problem}`: why there are none. */
async function tokenTexts(at, uid, engines, signal) {
  if (engines.length === 0) return { problem: "These are token ids: the run names no engine that could decode them." };
  try {
    return await get(`${at}/token_texts`, { uid }, signal);
  } catch (error) {
    signal.throwIfAborted();
    return { problem: `These are token ids, since the run's engine does not decode them: ${error.message}.` };
  }
}

/** A token as text; part of a character, or an unknown one, as its id. */
function tokenText(id, texts) {
  const known = texts?.[id];
  return known === undefined || known === "" || known.includes("\ufffd") ? `${id} ` : known;
}

function tokens(data, { params, filters }) {
  const { sample } = data.body;
  const options = colourings(sample, arraySources(data).map(({ label }) => label));
  const colour = options.some(([name]) => name === filters.colour) ? filters.colour : (options[0]?.[0] ?? "mask");
  const colours = coloured(colour, sample, data.values.get(colour));
  const readout = (token) => factsOf(sample, token, data.values).map(([name, value]) => `${name} ${value}`.trim()).join(" · ");
  const onLook = (token) => {
    document.getElementById("readout").textContent = visible(`Token ${token}: ${readout(token)}`);
  };
  const hint = `${number(sample.tokens.length)} tokens. Point at one, or move with the arrow keys.`;
  const shown = {
    key: `${params.uid} ${colour} ${data.values.has(colour)} ${Boolean(data.texts?.texts)}`, count: sample.tokens.length, colours, onLook,
    textOf: (token) => tokenText(sample.tokens[token], data.texts?.texts),
    isTrained: (token) => sample.mask?.[token] > 0,
  };
  return [
    h("p", { class: "filters" }, options.length ? filter("colour", "Colour by", colour, options) : null,
      sample.mask ? h("span", null, h("span", { class: "trained" }, "underlined"), ": trained on") : null,
      colours.legend.map(({ name, label }) => h("span", { class: `legend ${name}` }, text(label)))),
    data.problem ? h("p", { class: "error" }, text(data.problem)) : null,
    data.texts?.problem ? h("p", { class: "note" }, text(data.texts.problem)) : null,
    h("p", { id: "readout", class: "note", "aria-live": "polite", owned: true, ref: (node) => (node.textContent ||= hint) }),
    h("div", {
      class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens", "aria-describedby": "readout", owned: true,
      ref: (node) => TokenStrip.in(node).show(shown),
    }),
  ];
}
