/** What pages are made of: numbers, durations, tables, links, commands to copy. */

import { withFilters } from "./address.mjs";
import { h } from "./h.mjs";
import { text } from "./text.mjs";

/** A number with at most three digits after the point, its thousands grouped; a dash if there is none. */
export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** `12 s`, `4 min`, `3.2 h`, `5 d`. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds < 120) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${number(seconds / 3600, 1)} h` : `${number(seconds / 86_400, 1)} d`;
}

/** `41 MB`. */
export function size(bytes) {
  const power = Math.min(4, Math.floor(Math.log10(Math.max(1, bytes)) / 3));
  return `${number(bytes / 1000 ** power, 1)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

/** `3 groups`, `1 group`. */
export function counted(count, what) {
  return `${number(count)} ${what}${count === 1 ? "" : "s"}`;
}

/** Counts by name, largest first, without those that are 0: `12 invalid, 3 stale`. */
export function counts(numbers) {
  const found = Object.entries(numbers).filter(([, count]) => count > 0).sort((a, b) => b[1] - a[1]);
  return found.map(([name, count]) => `${number(count)} ${name.replaceAll("_", " ")}`).join(", ") || "–";
}

/** A link within the page; its text may be anyone's. */
export function link(href, label, props) {
  return h("a", { href, ...props }, text(label));
}

/**
 * A table: `columns` are `[title, cell(row)]`, or `[title, cell, "number"]`; `key(row)` names a row. Without rows,
 * `empty` says why.
 */
export function table(caption, columns, rows, key, empty) {
  if (rows.length === 0) return h("p", { class: "note" }, empty);
  const kind = ([, , name]) => (name ? { class: name } : {});
  return h("div", { class: "scrolls", tabindex: "0", role: "region", "aria-label": caption },
    h("table", null,
      h("caption", null, caption),
      h("thead", null, h("tr", null, columns.map((column) => h("th", { scope: "col", ...kind(column) }, column[0])))),
      h("tbody", null, rows.map((row) => h("tr", { key: key(row) },
        columns.map((column) => h("td", kind(column), shown(column[1](row)))))))));
}

function shown(cell) {
  return typeof cell === "string" || typeof cell === "number" ? text(cell) : (cell ?? "–");
}

/** Names with values; those without a value are left out. */
export function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return h("dl", null, known.map(([name, value]) => [h("dt", null, name), h("dd", null, shown(value))]));
}

/** A list of sentences in order of harm; the first one is what a visitor reads first. */
export function findings(sentences, calm) {
  if (sentences.length === 0) return h("p", { class: "calm" }, calm);
  return h("ul", { class: "findings", "aria-label": "What is wrong" },
    sentences.map((sentence) => h("li", null, sentence)));
}

/** A part of the page under a heading. */
export function section(title, ...children) {
  return h("section", { key: title }, h("h2", null, title), ...children);
}

/** An input bound to a filter of the address. `options` (`[value, label]`) make it a select. */
export function filter(name, label, value, options) {
  const onchange = (event) => location.replace(withFilters({ [name]: event.target.value }));
  const props = { name, value: value ?? "", onchange };
  const input = options
    ? h("select", props, options.map(([option, shownAs]) => h("option", { value: option }, shownAs)))
    : h("input", { ...props, type: "text", spellcheck: "false", autocomplete: "off", size: "12" });
  return h("label", null, `${label} `, input);
}

/** A word as a shell takes it. */
export function quoted(word) {
  return /^[\w./:@%+=-]+$/.test(word) ? word : `'${String(word).replaceAll("'", "'\\''")}'`;
}

/** A command that prints what the page shows, with a button that copies it, or else selects it. */
export function command(line) {
  const copy = async (event) => {
    const button = event.currentTarget;
    // Over plain HTTP to another host, browsers give pages no clipboard.
    if (!navigator.clipboard) return getSelection().selectAllChildren(button.parentNode.querySelector("code"));
    await navigator.clipboard.writeText(line);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 2000);
  };
  return h("span", { class: "command" }, "In a terminal: ", h("code", null, text(line)), " ",
    h("button", { type: "button", onclick: copy, "aria-label": "Copy the command" }, "copy"));
}
