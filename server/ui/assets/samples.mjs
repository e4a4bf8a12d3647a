/** The samples of a group: what each is called, their order, and their bodies. */

import { ApiError, getBytes, route } from "./api.mjs";
import { decode } from "./bodies.mjs";

/** `slot 2`, `slot 2, fork 1`; a sample in no slot by its uid. */
export function nameOf({ slot, fork, uid }) {
  if (slot < 0) return uid;
  return fork ? `slot ${slot}, fork ${fork}` : `slot ${slot}`;
}

/** Best reward first, then those that failed, then those in no slot. */
export function sorted(samples) {
  const rank = ({ outcome }) => (outcome === "member" || outcome === "failed" ? 0 : 1);
  const reward = ({ reward }) => reward ?? -Infinity;
  return [...samples].sort((a, b) => rank(a) - rank(b) || reward(b) - reward(a) || a.slot - b.slot || a.fork - b.fork);
}

/** How a rollout ended, in words that stand alone: `ok`, `failed: engine_failure`, `late`. */
export function endingOf({ outcome, rollout_outcome: rollout, status }) {
  const words = status === "failed" ? `failed: ${rollout ?? "no outcome"}` : (rollout ?? "ok");
  return outcome === "member" || outcome === "failed" ? words : `${outcome} (${words})`;
}

/** `{sample}` with the decoded body, or `{error}`: the words for its place. */
export async function bodyOf(run, group, view, signal) {
  if (!view.has_body) return { error: "Retention has removed this body. keep_bodies keeps more." };
  let bytes;
  try {
    const path = route`/v1/runs/${run}/groups/${group}/body`;
    bytes = await getBytes(path, { uid: view.uid }, signal);
  } catch (error) {
    if (!(error instanceof ApiError) || ![404, 409, 507].includes(error.status)) throw error;
    return { error: `${error.message}. ${error.hint}` };
  }
  try {
    return { sample: decode(bytes) };
  } catch (error) {
    return { error: `This body cannot be decoded: ${error.message}` };
  }
}
