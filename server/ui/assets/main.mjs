/** The frame: which page the address names, its heading, the token, the age of the data, and the command. */

import { match, read, to } from "./address.mjs";
import { getToken, setToken } from "./api.mjs";
import { h, render } from "./h.mjs";
import { Live } from "./live.mjs";
import { PAGES } from "./routes.mjs";
import { block, text, visible } from "./text.mjs";
import { command, duration, link } from "./widgets.mjs";

const THEMES = ["system", "light", "dark"];
const SAID_EVERY_MS = 10_000;
const OLD_MS = 3_000;

let current = { page: null, params: {}, filters: {}, path: null };
let live = null;
let said = { text: "", at: 0 };

function open() {
  const { path, filters } = read();
  const isOther = path !== current.path;
  const page = PAGES.find((each) => match(each.path, path) !== null);
  const params = page ? match(page.path, path) : {};
  const address = page && to(page.path, params, filters);
  // Pages with charts have a document, and a policy, of their own.
  if (page && !address.startsWith(`${location.pathname}#`)) return location.replace(address);
  current = { page, params, filters, path };
  if (!page) {
    live?.stop();
    live = null;
  } else if (isOther) {
    live?.stop();
    const load = (signal, previous) => page.load({ ...current, signal }, previous);
    live = new Live(load, (data) => (data === null ? 1000 : page.every(data)), draw);
  } else {
    live.refresh();
  }
  draw();
  if (isOther && document.readyState === "complete") {
    window.scrollTo(0, 0);
    document.querySelector("h1").focus({ preventScroll: true });
  }
}

function draw() {
  try {
    drawWith(body);
  } catch (error) {
    drawWith(() => undrawn(error));
  }
}

function drawWith(body) {
  const { page, params } = current;
  const title = page ? page.title(params) : "No such page";
  document.title = `${visible(title)} · Forebay`;
  if (live?.data && page?.said) say(page.said(live.data));
  render(document.body, [
    h("a", { class: "skip", href: "#main", onclick: skip }, "Skip to the content"),
    h("header", null,
      h("nav", { "aria-label": "Pages" }, h("a", { href: to("/") }, "Forebay"), trail().map(crumb)),
      themeSwitch()),
    h("main", { id: "main", tabindex: "-1" },
      h("h1", { tabindex: "-1" }, text(title)),
      notices(),
      page ? body() : h("p", null, "This address names no page. ", h("a", { href: to("/") }, "Go to the overview"))),
    h("footer", null, page ? command(page.command(params, current.filters, live?.data)) : null),
    h("p", { class: "unseen", role: "status" }, said.text),
  ]);
}

function body() {
  if (live?.data) return h("div", { key: current.path }, current.page.render(live.data, current));
  return live?.error ? null : h("p", { class: "note" }, "Loading …");
}

/** In place of data that the page cannot draw: why, and the text of the body if it shows one. */
function undrawn(error) {
  const raw = live?.data?.body?.sample?.raw;
  return [
    h("p", { class: "error", role: "alert" }, text(`The page cannot draw this: ${error.message}.`), " The command below prints it."),
    raw ? block(raw) : null,
  ];
}

/** The pages above this one: those whose path begins this one's. */
function trail() {
  const parts = current.path.split("/").filter(Boolean);
  const above = parts.map((_, index) => `/${parts.slice(0, index + 1).join("/")}`);
  return above.map((path) => ({ path, page: PAGES.find((each) => match(each.path, path)) })).filter((each) => each.page);
}

function crumb({ path, page }) {
  const params = match(page.path, path);
  const here = path === current.path ? { "aria-current": "page" } : {};
  return [h("span", { "aria-hidden": "true" }, " › "), link(to(page.path, params), page.title(params), here)];
}

function notices() {
  const error = live?.error;
  if (!error) return null;
  if (error.status === 401) return tokenForm(getToken() ? "The server refuses this token." : "");
  const age = live.data ? ` What you see is ${duration((Date.now() - live.at) / 1000)} old.` : "";
  const back = error.status === 404 ? h("a", { href: to("/") }, "Go to the overview") : null;
  return h("p", { class: "error", role: "alert" }, text(error.message), ". ", text(error.hint ?? ""), age, " ", back);
}

function tokenForm(refused) {
  const enter = (event) => {
    event.preventDefault();
    setToken(new FormData(event.target).get("token").trim());
    live.refresh();
  };
  // No header carries other characters.
  const ascii = { pattern: "\\s*[!-~][ -~]*\\s*", title: "Only printable ASCII characters" };
  return h("form", { class: "token", onsubmit: enter },
    h("p", { role: "alert" }, refused, " Enter the token of this server, or its viewer token. It stays in this tab."),
    h("label", null, "Token ", h("input", { name: "token", type: "password", autocomplete: "off", required: true, ...ascii })),
    " ", h("button", null, "Open"));
}

function skip(event) {
  event.preventDefault();
  document.querySelector("main").focus();
}

function themeSwitch() {
  const theme = localStorage.getItem("forebay-theme") ?? "system";
  document.documentElement.dataset.theme = theme;
  const onchange = (event) => {
    localStorage.setItem("forebay-theme", event.target.value);
    document.documentElement.dataset.theme = event.target.value;
    live?.changed();
  };
  return h("label", null, "Theme ", h("select", { value: theme, onchange }, THEMES.map((each) => h("option", null, each))));
}

/** For screen readers: a change, at most every ten seconds. */
function say(words) {
  if (words === said.text || Date.now() - said.at < SAID_EVERY_MS) return;
  said = { text: words, at: Date.now() };
}

addEventListener("hashchange", open);
setInterval(() => live?.error && Date.now() - live.at > OLD_MS && !document.hidden && draw(), 1000);
open();
