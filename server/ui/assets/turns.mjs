/** Messages as turns: an assistant message and the replies that it provoked. Anything else than messages is kept. */

import { plain } from "./text.mjs";

/** `{opening, turns: [{message, replies}]}`; `opening` are the messages before the first answer. */
export function turnsOf(messages) {
  const opening = [];
  const turns = [];
  for (const message of messages) {
    if (message?.role === "assistant") turns.push({ message, replies: [] });
    else (turns.at(-1)?.replies ?? opening).push(message);
  }
  return { opening, turns };
}

/** The text of a message's content; what is not text is named: `[image]`. */
export function textOf(message) {
  const content = message?.content;
  if (typeof content === "string") return content;
  if (content === null || content === undefined) return "";
  if (!Array.isArray(content)) return JSON.stringify(content);
  return content.map((part) => (typeof part?.text === "string" ? part.text : nameOf(part))).join("\n");
}

function nameOf(part) {
  const url = part?.image_url?.url ?? part?.image_url;
  if (typeof url !== "string") return JSON.stringify(part);
  return url.startsWith("data:") ? `[image, ${url.length} characters]` : `[image ${url}]`;
}

/** What the model thought before its answer, as far as the engine returned it apart. */
export function reasoningOf(message) {
  const found = [message?.reasoning_content, message?.reasoning].find((each) => typeof each === "string");
  return found ?? "";
}

/** The tool calls of a message: `{name, input}`, the input as text. */
export function callsOf(message) {
  if (!Array.isArray(message?.tool_calls)) return [];
  return message.tool_calls.map((call) => {
    const { name, arguments: given } = call?.function ?? {};
    const input = typeof given === "string" ? indented(given) : JSON.stringify(given ?? call, null, 2);
    return { name: plain(name) ?? "?", input };
  });
}

/** JSON as text with line breaks; another text as it is. */
export function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** One line that says what an assistant did: its text, else its calls, else its thoughts. */
export function summaryOf(message) {
  const calls = callsOf(message).map(({ name, input }) => `${name}(${input.replace(/\s+/g, " ")})`);
  return [textOf(message), ...calls].filter(Boolean).join(" ") || reasoningOf(message);
}
