"""What the trace of a run says of its attempts: their summaries, and when what was lost had begun again."""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from tests.kit import Json, NativeRun, ServerProcess

NS = 1_000_000_000


def summaries_of(server: ServerProcess, run: NativeRun) -> list[Json]:
    """Those of its rollouts, from all files of its trace."""
    trace = server.client.get(f"{run.path}/trace").text
    records = [json.loads(line) for line in trace.splitlines()]
    return [record for record in records if record["kind"] == "rollout"]


def restarts(summaries: list[Json], killed_ns: int) -> Iterator[float]:
    """Seconds from the kill until each lost rollout had begun elsewhere."""
    attempts: dict[str, list[Json]] = defaultdict(list)
    for each in summaries:
        attempts[each["uid"]].append(each)
    for of_one in attempts.values():
        of_one.sort(key=lambda each: each.get("attempt", 0))
        for lost, again in pairwise(of_one):
            if lost["ending"] == "lost":
                yield (again["started"] - killed_ns) / NS
