/** Requests to the server that served the page. The token is a header, kept in this tab alone. */

const TOKEN = "forebay-token";
const TIMEOUT_MS = 30_000;

export const getToken = () => sessionStorage.getItem(TOKEN) ?? "";
export const setToken = (token) => sessionStorage.setItem(TOKEN, token);

/** What the server refused, or that it could not be asked: then `status` is 0. */
export class ApiError extends Error {
  constructor(status, code, message, hint = "") {
    super(message);
    Object.assign(this, { status, code, hint });
  }
}

/** The JSON of a route: `get("/v1/runs", {limit: 5}, signal)`. Throws `ApiError`; the signal's own error if aborted. */
export async function get(path, parameters = {}, signal = undefined) {
  const reply = await fetched(path, parameters, signal);
  return await parsed(reply.text(), signal, JSON.parse);
}

/** The bytes of a route. */
export async function getBytes(path, parameters = {}, signal = undefined) {
  const reply = await fetched(path, parameters, signal);
  return await parsed(reply.arrayBuffer(), signal, (bytes) => bytes);
}

/** Lines of JSON, as `/annotations` returns them. */
export async function getLines(path, parameters = {}, signal = undefined) {
  const reply = await fetched(path, parameters, signal);
  return await parsed(reply.text(), signal, (all) => all.split("\n").filter(Boolean).map((line) => JSON.parse(line)));
}

/** A path whose parts are escaped: route`/v1/runs/${run}`. */
export function route(strings, ...values) {
  return strings.reduce((path, part, index) => path + encodeURIComponent(values[index - 1]) + part);
}

async function fetched(path, parameters, signal) {
  const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== null);
  const query = new URLSearchParams(given).toString();
  const signals = [AbortSignal.timeout(TIMEOUT_MS), ...(signal ? [signal] : [])];
  const headers = getToken() ? { authorization: `Bearer ${getToken()}` } : {};
  const options = { headers, signal: AbortSignal.any(signals), cache: "no-store", credentials: "omit" };
  let reply;
  try {
    reply = await fetch(query ? `${path}?${query}` : path, options);
  } catch (error) {
    signal?.throwIfAborted();
    throw new ApiError(0, "unreachable", "the server does not answer");
  }
  if (reply.ok) return reply;
  const { error } = await parsed(reply.text(), signal, JSON.parse).catch(() => ({}));
  const told = error ?? { code: "http_error", message: `the server answered ${reply.status}` };
  throw new ApiError(reply.status, told.code, told.message, told.hint);
}

async function parsed(body, signal, parse) {
  let arrived;
  try {
    arrived = await body;
  } catch (error) {
    signal?.throwIfAborted();
    throw new ApiError(0, "unreachable", "the server's reply broke off");
  }
  return parse(arrived);
}
