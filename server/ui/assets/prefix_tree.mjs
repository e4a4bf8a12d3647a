/** Where the samples of a group part: a tree of what they have in common, token by token. */

/**
 * The tree of samples `{tokens, logprobs, mask, reward, …}`. A node has `start` and `end` (tokens), `members` (the
 * samples that have these tokens) and `branches`, best reward first; a node without branches is where its members end
 * alike. A forked node has `isSampled`: whether the model chose there, or what it was given differs; and `gap`: the
 * largest difference of the branches' logprobs at the fork, or null.
 */
export function prefixTree(samples) {
  return samples.length ? node(samples, 0) : null;
}

function node(members, start) {
  const end = common(members, start);
  const going = Map.groupBy(members.filter(({ tokens }) => tokens.length > end), ({ tokens }) => tokens[end]);
  const ended = members.filter(({ tokens }) => tokens.length === end);
  const found = { start, end, members, branches: [] };
  if (going.size === 0) return found;
  found.branches = [...going.values()].map((some) => node(some, end));
  if (ended.length) found.branches.push({ start: end, end, members: ended, branches: [] });
  found.branches.sort((a, b) => meanReward(b.members) - meanReward(a.members));
  const parted = members.filter(({ tokens }) => tokens.length > end);
  found.isSampled = parted.some(({ mask }) => mask?.[end] > 0);
  found.gap = found.isSampled ? gapOf([...going.values()], end) : null;
  return found;
}

/** The token from which on the members no longer agree. */
function common(members, start) {
  const [first, ...others] = members;
  let end = first.tokens.length;
  for (const { tokens } of others) {
    const limit = Math.min(end, tokens.length);
    let at = start;
    while (at < limit && tokens[at] === first.tokens[at]) at += 1;
    end = at;
  }
  return end;
}

function gapOf(branches, at) {
  const sampled = (members) => members.filter(({ mask }) => mask?.[at] > 0);
  const means = branches.map((members) => mean(sampled(members).map(({ logprobs }) => logprobs?.[at])));
  const known = means.filter((value) => value !== null);
  return known.length > 1 ? Math.max(...known) - Math.min(...known) : null;
}

/** The mean of the numbers among `values`; null without any. */
export function mean(values) {
  const known = values.filter((value) => typeof value === "number" && !Number.isNaN(value));
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** The mean reward; of members that all failed, less than any. */
export function meanReward(members) {
  return mean(members.map(({ reward }) => reward)) ?? -Infinity;
}

/** The turn, from 1, in which a token is: the number of sampled stretches that begin up to it. 0 is the prompt. */
export function turnAt(mask, token) {
  let turns = 0;
  for (let at = 0; at <= token && at < mask.length; at += 1) if (mask[at] > 0 && !(mask[at - 1] > 0)) turns += 1;
  return turns;
}
