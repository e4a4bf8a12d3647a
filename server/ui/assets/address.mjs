/** The address: `/ui/#/runs/RUN?min_reward=1` is a page, its parameters and its filters. */

/** Filters that links to other pages keep. */
export const SHARED = ["min_reward", "instance"];

/** The page's path and filters, from the part after `#`. */
export function read() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  return { path: path || "/", filters: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

/** The parameters of `path` if it matches `pattern` (`/runs/:run`), else null. */
export function match(pattern, path) {
  const wanted = pattern.split("/");
  const given = path.replace(/(.)\/$/, "$1").split("/");
  if (wanted.length !== given.length) return null;
  const params = {};
  for (const [index, part] of wanted.entries()) {
    if (part.startsWith(":")) params[part.slice(1)] = decoded(given[index]);
    else if (part !== given[index]) return null;
  }
  return params;
}

/** A link to a page: `to("/runs/:run", {run})`. It keeps the shared filters; `filters` adds others. */
export function to(pattern, params = {}, filters = {}) {
  const path = pattern.replace(/:(\w+)/g, (_, name) => encodeURIComponent(params[name]));
  const current = read().filters;
  const kept = Object.fromEntries(SHARED.filter((name) => name in current).map((name) => [name, current[name]]));
  return address(path, { ...kept, ...filters });
}

/** This page with other filters; a filter that becomes "" or null goes. */
export function withFilters(changes) {
  const { path, filters } = read();
  return address(path, { ...filters, ...changes });
}

const charted = [];

/** Note a pattern whose page draws charts: it has a document, and a policy, of its own. */
export function noteCharts(pattern) {
  charted.push(pattern);
}

function address(path, filters) {
  const given = Object.entries(filters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(given).toString();
  const document = charted.some((pattern) => match(pattern, path)) ? "/ui/charts" : "/ui/";
  return `${document}#${path}${query ? `?${query}` : ""}`;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
