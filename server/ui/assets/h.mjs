/** Elements as data: `h("p", {class: "note"}, "text")`, patched into the document by `patch`. */

const SVG = "http://www.w3.org/2000/svg";
/** Set as properties, and only when they change: what the user typed or opened stays. */
const LIVE = new Set(["value", "checked", "open", "selected", "disabled", "indeterminate"]);

/**
 * An element. Children may be elements, text, lists of both, or null. Special properties: `key` (unique among its
 * siblings: it keeps its node when the order changes), `ref` (called with the node after each patch), `owned` (its
 * children belong to other code), `style` (an object), `on…` (a listener).
 */
export function h(tag, props, ...children) {
  const known = children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
  return { tag, props: props ?? {}, children: known };
}

/** Make the children of `parent` those described. Nodes that stay keep focus, selection and scroll. */
export function patch(parent, children) {
  const wanted = new Set(children.map((child) => child.props?.key).filter((key) => key !== undefined));
  const keyed = new Map();
  for (const node of [...parent.childNodes]) {
    const key = node.described?.key;
    if (key === undefined) continue;
    if (wanted.has(key)) keyed.set(key, node);
    else node.remove();
  }
  let at = parent.firstChild;
  for (const child of children) {
    const node = reused(at, keyed, child) ?? made(parent, child);
    if (node === at) at = at.nextSibling;
    else parent.insertBefore(node, at);
    if (child.tag !== undefined) update(node, child);
  }
  while (at !== null) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

/** Patch the whole page; an element that had to move gets its focus back. */
export function render(root, children) {
  const focused = document.activeElement;
  const selection = focused?.selectionStart;
  patch(root, children.flat(Infinity).filter(Boolean));
  if (focused === document.activeElement || !focused?.isConnected) return;
  focused.focus({ preventScroll: true });
  if (typeof selection === "number") focused.setSelectionRange?.(selection, selection);
}

function reused(at, keyed, child) {
  const key = child.props?.key;
  const node = key === undefined ? at : keyed.get(key);
  if (!node || (key === undefined && node.described?.key !== undefined)) return null;
  if (child.tag === undefined) {
    if (node.nodeType !== Node.TEXT_NODE) return null;
    const text = String(child);
    if (node.data !== text) node.data = text;
    return node;
  }
  return node.localName === child.tag ? node : null;
}

function made(parent, child) {
  if (child.tag === undefined) return document.createTextNode(String(child));
  const space = child.tag === "svg" ? SVG : parent.namespaceURI;
  return document.createElementNS(space, child.tag);
}

function update(node, { props, children }) {
  const before = node.described ?? {};
  for (const name of Object.keys(before)) if (!(name in props)) set(node, name, null);
  for (const [name, value] of Object.entries(props)) if (before[name] !== value) set(node, name, value);
  node.described = props;
  if (!props.owned) patch(node, children);
  // A select takes its value only once it has its options.
  if (node.localName === "select" && "value" in props && before.value !== props.value) node.value = props.value;
  props.ref?.(node);
}

function set(node, name, value) {
  if (name === "key" || name === "ref" || name === "owned") return;
  if (name.startsWith("on")) node[name] = value;
  else if (name === "style") setStyle(node, value ?? {});
  else if (LIVE.has(name)) node[name] = value ?? (name === "value" ? "" : false);
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else if (name === "href" && !/^(#|\/ui\/)/.test(value)) throw new Error("links lead only within the page");
  else node.setAttribute(name, value === true ? "" : String(value));
}

function setStyle(node, style) {
  node.removeAttribute("style");
  for (const [name, value] of Object.entries(style)) node.style.setProperty(name, value);
}
