"""Main module of a run process: assembles its jobs and runs the user's generator.

Started by ``forebay.generators.process.monitor``, with the link to the server.
"""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.core.scheduling.policy import PastRollout
from forebay.generators.job.composition import Composition, compose, composition
from forebay.generators.process.main import main as run_generator
from forebay.generators.process.spec import RunSpec

if TYPE_CHECKING:
    from forebay.generators.buffer_link.abc import Plan
    from forebay.generators.job.ports import RolloutPlaces

LAST_WORKER_S = 30.0
"""Seconds that workers have to finish their own ``run_rollout`` once the lead's has returned."""


def main(arguments: list[str]) -> None:
    """Run ``forebay.generators.process.main`` with jobs assembled by this module."""
    run_generator(arguments, prepare)
    places = composition().places
    if places is not None:
        places.close(LAST_WORKER_S)


def prepare(spec: RunSpec) -> None:
    """Give jobs the recorded history of this run and earlier ones, and the workers that run their rollouts."""
    own = Path(spec.trace["folder"]) if spec.trace is not None else None
    history = partial(_history, own, [Path(folder) for folder in spec.earlier_traces])
    compose(Composition(history, _places(spec) if spec.workers else None))


def _places(spec: RunSpec) -> "RolloutPlaces":
    from forebay.workers.rollouts.lead import RunWorkers, nodes_reach, worker_starter

    return RunWorkers(worker_starter(spec), sum(spec.workers), nodes_reach(spec))


def _history(own: Path | None, earlier: Sequence[Path], plan: "Plan") -> Sequence[PastRollout]:
    if plan.scheduler is None:  # the default policy uses no history
        return ()
    from forebay.workers.scheduling.history import RecordedHistory

    return RecordedHistory(own, earlier)


if __name__ == "__main__":
    main(sys.argv[1:])
