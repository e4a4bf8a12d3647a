"""Scenario of a simulated run, and its result."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from forebay.core.clock import ActiveClock
from forebay.core.errors import InvalidInput
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import PastRollout
from forebay.core.scheduling.scheduler import Scheduler
from forebay.core.task_row import TaskRow
from forebay.generators.base import FIRST_PLACES
from forebay.generators.buffer_link.abc import Plan
from forebay.generators.job.composition import policy_of
from forebay.generators.job.group_feed import Schedule
from forebay.generators.job.job import RolloutJob
from forebay.generators.job.ports import JobParts
from forebay.generators.job.reporter import Reporter
from forebay.generators.rollouts.open_group import StepBarrier
from forebay.generators.rollouts.rollout_trace import RolloutTraces
from forebay.workers.simulator.attempt_records import AttemptRecords, SimulatedRollout
from forebay.workers.simulator.cost import EngineCost
from forebay.workers.simulator.engine_model import EngineUse
from forebay.workers.simulator.modelled_engines import EngineFailure, ModelledEngines
from forebay.workers.simulator.modelled_runner import ModelledRunner, ModelledWriter
from forebay.workers.simulator.modelled_trainer import GroupClosing, ModelledTrainer, SimulatedStep
from forebay.workers.simulator.populations import AnswerLengths, Answers
from forebay.workers.simulator.virtual_loop import LoopClock, run_virtual

if TYPE_CHECKING:
    from forebay.core.scheduling.oversampling import Oversampling

NEVER_S = 1e9
RUN_ID = "run-simulated"
CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class Scenario:
    """Settings of a simulated run, with modelled engines and prompts."""

    prompts: Sequence[AnswerLengths]
    group_size: int = 8
    num_process: 'int | Literal["auto"]' = 256
    engines: Sequence[EngineCost] = (EngineCost(),)
    scheduler: Scheduler = field(default_factory=Scheduler)
    oversampling: "Oversampling | None" = None
    max_tokens: int = 1 << 20
    """Most tokens of one answer."""
    train_s: float = 0.0
    """Seconds from the last sample of a step to the next weights."""
    num_steps: int | None = None
    """Steps after which the run is stopped; None: at the end of its input."""
    num_epochs: int = 1
    seed: int = 0
    failures: Sequence[EngineFailure] = ()
    closings: Sequence[GroupClosing] = ()
    history: Sequence[PastRollout] = ()
    groups_per_read: int | None = None
    """Complete groups that the trainer takes for a step; None: ``groups_per_step`` of ``oversampling``."""
    group_timeout_s: float = NEVER_S
    group_deadline_s: float = NEVER_S

    def __post_init__(self) -> None:
        if not self.prompts:
            raise InvalidInput("a simulation needs at least one prompt", field="prompts")
        if not self.engines:
            raise InvalidInput("a simulation needs at least one engine", field="engines")
        if self.num_steps is not None and self.step_groups is None:
            hint = "set groups_per_step of oversampling, or groups_per_read"
            raise InvalidInput("num_steps needs the groups of a step", hint=hint, field="num_steps")

    @property
    def step_groups(self) -> int | None:
        """Groups of one training step."""
        held = self.oversampling.groups_per_step if self.oversampling is not None else None
        return self.groups_per_read or held

    @property
    def answers(self) -> Answers:
        """Answers of its rollouts."""
        return Answers(self.seed, self.group_size)


@dataclass(frozen=True)
class SimulatedRun:
    """Result of a scenario."""

    scenario: Scenario
    rollouts: list[SimulatedRollout]
    makespan_s: float
    steps: list[SimulatedStep]
    counts: Mapping[str, int]
    """The job's counts."""
    engines: list[EngineUse] = field(default_factory=list)


def simulate(scenario: Scenario) -> SimulatedRun:
    """Run the job of a run process in virtual time. Raises ``InvalidInput``, ``SimulationStuck``."""
    return run_virtual(_simulated(scenario))


async def _simulated(scenario: Scenario) -> SimulatedRun:
    plan = _plan_of(scenario)
    clock = ActiveClock(LoopClock())
    clock.run(True)
    records = AttemptRecords(RUN_ID)
    traces = RolloutTraces(records, RUN_ID)
    trainer = ModelledTrainer(
        scenario.group_size, scenario.step_groups, scenario.train_s, scenario.num_steps, records.trained
    )
    reporter = Reporter(trainer, clock)
    engines = ModelledEngines(scenario.engines, reporter.note_waiting)
    prompts = {prompt.instance_id: prompt for prompt in scenario.prompts}
    runner = ModelledRunner(engines, prompts.__getitem__, scenario.answers, scenario.max_tokens, RUN_ID)
    job = RolloutJob(
        JobParts(
            plan=plan,
            schedule=Schedule(_ModelledRows(scenario.prompts), range(scenario.num_epochs), plan, []),
            link=trainer,
            pool=engines,
            runner=runner,
            writer=ModelledWriter(trainer.take, traces.note_judged),
            reporter=reporter,
            clock=clock,
            hold=StepBarrier(plan.groups_per_step),
            policy=policy_of(plan, scenario.max_tokens, scenario.history),
            loads=EngineLoads(FIRST_PLACES if scenario.num_process == "auto" else scenario.num_process),
            traces=traces,
            adjusts_places=scenario.num_process == "auto",
        )
    )
    engines.schedule(scenario.failures)
    trainer.schedule(scenario.closings)
    loop = asyncio.get_running_loop()
    training = loop.create_task(trainer.train())
    totals = await job.run()
    makespan_s = loop.time()
    await training
    uses = [model.use for model in engines.models]
    return SimulatedRun(scenario, records.rollouts, makespan_s, trainer.steps, totals.counts, uses)


def _plan_of(scenario: Scenario) -> Plan:
    oversampling = scenario.oversampling
    return Plan(
        RUN_ID,
        scenario.group_size,
        scenario.group_timeout_s,
        scenario.group_deadline_s,
        oversampling=oversampling.checked(scenario.group_size) if oversampling is not None else None,
        scheduler=scenario.scheduler,
    )


class _ModelledRows:
    """Replaces a ``RowFile``."""

    def __init__(self, prompts: Sequence[AnswerLengths]) -> None:
        self._prompts = prompts

    @property
    def num_rows(self) -> int:
        """Number of rows. Implements ``JobRows``, like ``rows``."""
        return len(self._prompts)

    def rows(self, epoch: int = 0) -> Iterator[TaskRow]:  # noqa: ARG002 - all epochs have equal rows
        for number, prompt in enumerate(self._prompts):
            content = "x" * (prompt.prompt_tokens * CHARS_PER_TOKEN)
            yield TaskRow(number, prompt.instance_id, [{"role": "user", "content": content}], {})
