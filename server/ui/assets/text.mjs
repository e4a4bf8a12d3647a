/** Text of models, tools and generators, made safe to look at: the twin of `telemetry/visible_text.py`. */

import { h } from "./h.mjs";

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\u{e0000}-\u{e007f}]/gu;

/** A value of others as text; null if it is none. `String` would call what an object has as its `toString`. */
export function plain(value) {
  if (value === null || value === undefined) return null;
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}

/** `text` with its control, bidirectional and invisible characters escaped: `\x1b`, `\u202e`. */
export function visible(text) {
  return (plain(text) ?? "").replace(HIDDEN, escaped);
}

function escaped(character) {
  const code = character.codePointAt(0);
  const digits = code.toString(16);
  if (code === 13) return "\\r";
  if (code < 0x100) return `\\x${digits.padStart(2, "0")}`;
  return code < 0x10000 ? `\\u${digits.padStart(4, "0")}` : `\\U${digits.padStart(8, "0")}`;
}

/** A value of others in a line of ours: it cannot change the direction of what stands beside it. */
export function text(value) {
  return h("bdi", null, visible(value ?? ""));
}

/** A text of several lines, as it was written. */
export function block(value, props) {
  return h("pre", { dir: "auto", ...props }, visible(value ?? ""));
}
