/** The tokens of a sample as text: all of them can be searched, and only those near the view are elements. */

import { visible } from "./text.mjs";

const BLOCK = 256;
const AHEAD = "800px";

/** One strip in an element that belongs to it: `ref: (node) => TokenStrip.in(node).show(...)`. */
export class TokenStrip {
  static in(node) {
    node.strip ??= new TokenStrip(node);
    return node.strip;
  }

  constructor(node) {
    Object.assign(this, { node, shown: {}, at: 0 });
    node.addEventListener("pointerover", (event) => this.look(event.target.token));
    node.addEventListener("click", (event) => this.look(event.target.token));
    node.addEventListener("keydown", (event) => this.step(event));
  }

  /**
   * Draw `count` tokens: `textOf(token)`, the colours of `coloured`, `isTrained(token)`; `onLook(token)` is called for
   * the token under the pointer or the cursor. Does nothing if `key` is that of the last call.
   */
  show(shown) {
    if (this.shown.key === shown.key) return;
    this.shown = shown;
    this.watcher?.disconnect();
    const fill = ({ target, isIntersecting }) => this.fill(target, isIntersecting);
    this.watcher = new IntersectionObserver((seen) => seen.forEach(fill), { root: this.node, rootMargin: AHEAD });
    this.blocks = Array.from({ length: Math.ceil(shown.count / BLOCK) }, (_, number) => this.block(number * BLOCK));
    this.node.replaceChildren(...this.blocks);
    for (const block of this.blocks) this.watcher.observe(block);
    this.at = Math.min(this.at, Math.max(0, shown.count - 1));
  }

  block(first) {
    const block = document.createElement("div");
    block.className = "tokens-block";
    block.first = first;
    this.fill(block, false);
    return block;
  }

  fill(block, isNear) {
    if (block.isNear === isNear) return;
    block.isNear = isNear;
    const end = Math.min(block.first + BLOCK, this.shown.count);
    const numbers = Array.from({ length: end - block.first }, (_, place) => block.first + place);
    if (isNear) block.replaceChildren(...numbers.map((token) => this.span(token)));
    else block.textContent = numbers.map((token) => this.textOf(token)).join("");
  }

  span(token) {
    const { colours, isTrained } = this.shown;
    const span = document.createElement("span");
    span.token = token;
    span.textContent = this.textOf(token);
    span.className = `${colours.classOf(token)} ${isTrained(token) ? "trained" : ""} ${token === this.at ? "cursor" : ""}`;
    if (colours.markOf(token)) span.dataset.mark = visible(colours.markOf(token));
    return span;
  }

  textOf(token) {
    return visible(this.shown.textOf(token));
  }

  look(token) {
    if (token === undefined) return;
    this.find(this.at)?.classList.remove("cursor");
    this.at = token;
    this.find(token).classList.add("cursor");
    this.shown.onLook(token);
  }

  find(token) {
    const block = this.blocks[Math.floor(token / BLOCK)];
    return block?.isNear ? block.children[token - block.first] : null;
  }

  step(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: BLOCK, PageUp: -BLOCK, Home: -Infinity, End: Infinity };
    const step = steps[event.key];
    if (step === undefined || this.shown.count === 0) return;
    event.preventDefault();
    const token = Math.max(0, Math.min(this.shown.count - 1, this.at + step));
    this.fill(this.blocks[Math.floor(token / BLOCK)], true);
    this.look(token);
    this.find(token).scrollIntoView({ block: "nearest" });
  }
}
