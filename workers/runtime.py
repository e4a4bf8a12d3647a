"""The main of a run process: puts its jobs together, and runs the user's generator.

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
"""So long what stands behind the jobs of ``run_rollout`` may go on in workers once it has returned in the lead."""


def main(arguments: list[str]) -> None:
    """Of ``forebay.generators.process.main``, for jobs that are put together here."""
    run_generator(arguments, prepare)
    places = composition().places
    if places is not None:
        places.close(LAST_WORKER_S)


def prepare(spec: RunSpec) -> None:
    """From now on jobs know what this run, and earlier ones, have recorded, and who runs their rollouts."""
    own = Path(spec.trace["folder"]) if spec.trace is not None else None
    history = partial(_history, own, [Path(folder) for folder in spec.earlier_traces])
    compose(Composition(history, _places(spec) if spec.workers else None))


def _places(spec: RunSpec) -> "RolloutPlaces":
    from forebay.workers.rollouts.lead import RunWorkers, nodes_reach, worker_starter

    return RunWorkers(worker_starter(spec), sum(spec.workers), nodes_reach(spec))


def _history(own: Path | None, earlier: Sequence[Path], plan: "Plan") -> Sequence[PastRollout]:
    if plan.scheduler is None:  # the default policy does not look at it
        return ()
    from forebay.workers.scheduling.history import RecordedHistory

    return RecordedHistory(own, earlier)


if __name__ == "__main__":
    main(sys.argv[1:])
