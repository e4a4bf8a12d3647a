/** How the tokens of a sample are coloured, and the words that say the same: a legend, marks, and values. */

import { plain } from "./text.mjs";

const NUM_LEVELS = 6;
const NUM_KINDS = 6;
const LOOKED_AT = 4096;
const LOGPROB_BOUNDS = [-0.05, -0.3, -1, -2.5, -5];

/** What a decoded sample can be coloured by, as options of a select; `arrays` are names of further numbers. */
export function colourings(sample, arrays) {
  const spans = spansOf(sample);
  const known = [
    ["mask", "what is trained on", sample.mask],
    ["source", "source", spans.length > 0],
    ["version", "weight version", versionsOf(sample).some((version) => version !== null)],
    ["logprob", "logprob of the engine", sample.logprobs],
  ];
  return [...known.filter(([, , has]) => has).map(([name, label]) => [name, label]), ...arrays.map((name) => [name, name])];
}

/**
 * `{classOf(token), markOf(token), legend}` for one of `colourings`; `values` are the numbers of a further array.
 * `markOf` is the text before a token at which a kind begins, or "".
 */
export function coloured(name, sample, values) {
  if (name === "logprob") return levels(sample.logprobs, LOGPROB_BOUNDS);
  if (name === "source") return kinds(filled(sample, ({ source }) => plain(source)));
  if (name === "version") return kinds(filled(sample, versionOf).map((version) => (version === null ? null : `v${version}`)));
  if (values) return levels(values, bounds(values));
  const isTrained = (token) => sample.mask?.[token] > 0;
  return { classOf: () => "", markOf: () => "", isTrained, legend: [] };
}

/** What is known of one token: `[name, value]` pairs. */
export function factsOf(sample, token, further) {
  const [span] = spansOf(sample).filter(({ start, end }) => start <= token && token < end);
  const facts = [["id", sample.tokens[token]]];
  if (sample.mask) facts.push(["", sample.mask[token] > 0 ? "trained on" : "not trained on"]);
  if (span) facts.push(["source", plain(span.source)]);
  if (span && versionOf(span) !== null) facts.push(["version", versionOf(span)]);
  if (sample.logprobs && !Number.isNaN(sample.logprobs[token])) facts.push(["logprob", rounded(sample.logprobs[token])]);
  for (const [name, values] of further) if (!Number.isNaN(values[token])) facts.push([name, rounded(values[token])]);
  return facts;
}

/** The spans of a sample that are of the documented form. */
export function spansOf(sample) {
  const spans = sample.fields?.token_spans;
  const isSpan = (span) => Number.isInteger(span?.start) && Number.isInteger(span.end);
  return Array.isArray(spans) ? spans.filter(isSpan) : [];
}

/** The weight versions of a sample's spans. */
export function versionsOf(sample) {
  return [...new Set(spansOf(sample).map(versionOf))];
}

const versionOf = ({ weight_version: version }) => plain(version);

function filled(sample, valueOf) {
  const found = new Array(sample.tokens.length).fill(null);
  for (const span of spansOf(sample)) found.fill(valueOf(span), span.start, span.end);
  return found;
}

function kinds(values) {
  const names = [...new Set(values)].filter((value) => value !== null);
  const places = new Map(names.map((name, place) => [name, place % NUM_KINDS]));
  const classOf = (token) => (values[token] === null ? "" : `kind${places.get(values[token])}`);
  return {
    classOf,
    markOf: (token) => (values[token] !== null && values[token] !== values[token - 1] ? `${values[token]}` : ""),
    legend: names.map((name) => ({ name: classOf(values.indexOf(name)), label: name })),
  };
}

/** Colours for numbers: a level for each stretch between two of the `limits`, which begin near 0 or at the least. */
function levels(values, limits) {
  const isFalling = limits[0] > limits.at(-1);
  const isBeyond = (value, limit) => (isFalling ? value < limit : value > limit);
  const levelOf = (value) => limits.filter((limit) => isBeyond(value, limit)).length;
  const classOf = (token) => (Number.isNaN(values[token]) ? "" : `level${levelOf(values[token])}`);
  const sign = isFalling ? "≥" : "≤";
  const legend = limits.map((limit, level) => ({ name: `level${level}`, label: `${sign} ${rounded(limit)}` }));
  legend.push({ name: `level${limits.length}`, label: `${isFalling ? "<" : ">"} ${rounded(limits.at(-1) ?? 0)}` });
  return { classOf, markOf: () => "", legend };
}

/** Limits that divide the values into parts of about the same size. */
function bounds(values) {
  const step = Math.max(1, Math.ceil(values.length / LOOKED_AT));
  const some = Float64Array.from({ length: Math.ceil(values.length / step) }, (_, at) => values[at * step]);
  const known = some.filter((value) => !Number.isNaN(value)).sort();
  const found = Array.from({ length: NUM_LEVELS - 1 }, (_, at) => known[Math.floor(((at + 1) * known.length) / NUM_LEVELS)]);
  return [...new Set(found)].filter((value) => value !== undefined);
}

const rounded = (value) => Number(value.toPrecision(4)).toString();
