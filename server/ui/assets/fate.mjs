/** Who decided what became of a group, in a sentence, and what each hook was given. */

import { counted, number } from "./widgets.mjs";

const FILTERING = ["filter_item", "normalize_group_data", "pad_group_data"];

/** `{text, isBad}`: the state of a group, who decided it, and on what. `run` is the run's view. */
export function fateOf(group, run) {
  const { state, reason } = group;
  const step = group.step === null || group.step === undefined ? "" : ` in step ${group.step}`;
  if (state === "discarded") return { text: `Discarded as ${reason}: ${why(group, run)}`, isBad: reason !== "evaluated" };
  const salvaged = group.is_salvaged ? " It is salvaged: its deadline passed with fewer samples than slots." : "";
  const texts = {
    open: `Open: ${group.num_samples} of ${run.settings.group_size} slots have a sample.`,
    ready: `Ready: ${by("is_valid_group", run)} accepted it, and it waits for the trainer.`,
    leased: `Leased to the trainer${step}, in batch ${group.batch_id}.`,
    acked: `Delivered${step}, in batch ${group.batch_id}, and acknowledged.`,
  };
  return { text: (texts[state] ?? state) + salvaged, isBad: false };
}

function why(group, run) {
  const [first] = group.detail.split("\n");
  const { settings, evaluates } = run;
  switch (group.reason) {
    case "invalid":
      return `${by("is_valid_group", run)} refused it. ${rewardsText(group.samples)}.`;
    case "filtered":
      return `${by("filter_item", run)} left too few samples: ${first}. ${rewardsText(group.samples)}.`;
    case "incomplete":
      return `a slime route delivers only whole groups, and ${first} by ${deciding(run)}${failedText(group)}.`;
    case "hook_failed":
      return `${first.replace(/^hook (\w+) failed/, (_, hook) => `${by(hook, run)} failed`)}.`;
    case "timed_out":
      return `${first} before a deadline (group_timeout_seconds: ${number(settings.group_timeout_seconds)}, `
        + `group_deadline_seconds: ${number(settings.group_deadline_seconds)}), or before the run gave up its free slots.`;
    case "failed":
      return `no sample is left to deliver: ${first}.`;
    case "unreadable":
      return `the server lost a part of it: ${first}.`;
    case "stale":
      return `${first}. max_staleness is ${settings.max_staleness ?? "a number that the trainer gave with its read"}.`;
    case "evaluated":
      return `it belongs to the evaluation of ${evaluates?.task} at step ${evaluates?.step}, and goes to no trainer.`;
    default:
      return first || "no detail was recorded";
  }
}

function failedText({ num_failed: failed }) {
  return failed ? `; ${counted(failed, "sample")} failed` : "";
}

/** The hooks of a user that make the rows of a group, or that there are none. */
function deciding(run) {
  return processing(run).filter((hook) => isOwn(hook, run)).map((hook) => by(hook, run)).join(" and ") || "the built-in hooks";
}

/** The hooks that make the rows of a valid group: those of contract A, or that of B. */
function processing(run) {
  const { contract } = run.settings;
  const isB = contract ? contract === "B" : isOwn("transform_group", run);
  return isB ? ["transform_group"] : FILTERING;
}

function isOwn(hook, run) {
  return (run.hooks[hook] ?? []).some((name) => name !== "built-in");
}

function by(hook, run) {
  return `${hook} (${implementers(hook, run)})`;
}

function implementers(hook, run) {
  return (run.hooks[hook] ?? []).join(", then ") || "built-in";
}

/** What the rewards of a group have in common: `All 4 rewards are 0`. */
function rewardsText(samples) {
  const rewards = judged(samples).map(({ reward }) => reward);
  if (rewards.length === 0) return "No sample has a reward";
  const [least, most] = [Math.min(...rewards), Math.max(...rewards)];
  if (rewards.length === 1) return `Its only reward is ${number(least)}`;
  return least === most
    ? `All ${rewards.length} rewards are ${number(least)}`
    : `Its ${rewards.length} rewards are from ${number(least)} to ${number(most)}`;
}

/** The samples that hooks are given: those in the group that did not fail. */
export function judged(samples) {
  return samples.filter(({ outcome, reward, fork }) => outcome === "member" && reward !== null && !fork);
}

/** A row for each hook of the read: `{hook, by, saw}`. */
export function hooksOf(group, run) {
  const shown = counted(judged(group.samples).length, "sample");
  const failed = group.num_failed ? `; ${group.num_failed} failed, which no hook sees` : "";
  const wasFiltered = ["filtered", "incomplete"].includes(group.reason) || ["leased", "acked"].includes(group.state);
  const later = wasFiltered ? (group.num_forks ? `${shown} and their forks` : shown) : "not asked, as far as is recorded";
  return ["is_valid_group", ...processing(run)].map((hook, place) => ({
    hook,
    by: implementers(hook, run),
    saw: place === 0 ? `${shown}${failed}. ${rewardsText(group.samples)}` : later,
  }));
}

/** The slots of the group without a sample. */
export function missingSlots(group, run) {
  const inSlots = group.samples.filter(({ outcome }) => outcome === "member" || outcome === "failed");
  const filled = new Set(inSlots.map(({ slot }) => slot));
  const slots = Array.from({ length: Math.min(run.settings.group_size, 1024) }, (_, slot) => slot);
  return slots.filter((slot) => !filled.has(slot));
}
