"""One pass of a generator over its rows: opens the job's resources, runs the job, and closes them."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from forebay.core.addresses import is_http_url
from forebay.core.clock import ActiveClock, SystemClock
from forebay.core.errors import InvalidInput
from forebay.core.ids import new_run_id
from forebay.core.outcome import RolloutOutcome
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.scheduler_checks import check_engines
from forebay.engines.chat_template import load_template
from forebay.engines.pool import EnginePool
from forebay.generators.buffer_link.abc import Link, Plan, RunGone
from forebay.generators.buffer_link.forebay import ServerLink
from forebay.generators.buffer_link.slime import SlimeLink
from forebay.generators.job.composition import composition, policy_of
from forebay.generators.job.group_feed import Schedule
from forebay.generators.job.input_rows import RowFile
from forebay.generators.job.job import RolloutJob
from forebay.generators.job.plan_record import record_plan
from forebay.generators.job.ports import JobContext, JobParts, JobPlaces, MemberParts, MemberShare
from forebay.generators.job.replayed_groups import ReplayedGroups, ReplayParts
from forebay.generators.job.reporter import Reporter, Totals
from forebay.generators.rewards import Rewarder, RewardFunc
from forebay.generators.rollouts.open_group import StepBarrier
from forebay.generators.rollouts.rejudging import Rejudge, check_judge
from forebay.generators.rollouts.rollout_trace import RolloutTraces
from forebay.telemetry.tracing.stall_watch import StallWatch
from forebay.telemetry.tracing.tracer import NO_TRACE, Tracer, run_tracer

if TYPE_CHECKING:
    from forebay.generators.base import BaseGenerator
    from forebay.generators.rollouts.attempts import RolloutFunc, RolloutRunner

logger = logging.getLogger(__name__)

REPLAYED_AHEAD = 64
"""Maximum number of recorded samples, with bodies, waiting to be written."""


async def run(
    generator: "BaseGenerator", rows: RowFile, epochs: range, rollout_func: "RolloutFunc", reward_func: RewardFunc
) -> Totals:
    """Pass over the rows until the buffer has every sample or the run was stopped."""
    where = composition()
    if where.member is not None:
        return await where.member.serve(partial(_member_parts, generator, rollout_func, reward_func))
    totals = None
    try:
        totals = await _run_job(generator, rows, epochs, rollout_func, reward_func)
    finally:
        if where.places is not None:
            where.places.end_job(totals)
    return totals


async def _run_job(
    generator: "BaseGenerator", rows: RowFile, epochs: range, rollout_func: "RolloutFunc", reward_func: RewardFunc
) -> Totals:
    async with AsyncExitStack() as stack:
        try:
            parts = await _open(stack, generator, rows, epochs, rollout_func, reward_func)
        except RunGone as error:
            logger.info("nothing to do: %s", error)
            return Totals(is_stopped=True)
        logger.info("%s, run %s: %d epochs of %s", generator.task_type, parts.plan.run_id, len(epochs), rows.path)
        _watch_loop(stack, _tracer_of(parts.plan.run_id))
        return await RolloutJob(parts).run()


async def _open(
    stack: AsyncExitStack,
    generator: "BaseGenerator",
    rows: RowFile,
    epochs: range,
    rollout_func: "RolloutFunc",
    reward_func: RewardFunc,
) -> JobParts:
    places = composition().places
    if places is None:  # an unusable reward function is rejected before any request is sent
        rewarder = await stack.enter_async_context(_rewarder(generator, reward_func, generator.num_reward_workers))
    context = await _context(stack, generator)
    schedule = Schedule(rows, epochs, context.plan, generator.listed_ids)
    replayed = await _replayed(stack, generator, context, schedule, reward_func)
    # In a thread: it reads the whole file, and engine outages must still be reported.
    if context.plan.replay is None or context.plan.replay.groups is None:
        context.reporter.totals.num_groups_total = await asyncio.to_thread(schedule.num_groups_total)
    record_plan(
        context.tracer,
        context.plan,
        generator.remote_engine_url,
        task_type=generator.task_type or "",
        num_process=generator.num_process,
        num_epochs=len(epochs),
        max_tokens=generator.max_tokens,
        max_attempts=generator.max_attempts,
    )
    if places is None:
        here = _places_here(stack, context, generator, rollout_func, rewarder)
    else:
        here = await stack.enter_async_context(places.opened(context))
    return JobParts(
        plan=context.plan,
        schedule=schedule,
        link=context.link,
        pool=here.pool,
        runner=here.runner,
        writer=here.writer,
        reporter=context.reporter,
        clock=context.clock,
        hold=context.hold,
        policy=await asyncio.to_thread(policy_of, context.plan, generator.max_tokens),
        loads=context.loads,
        traces=here.traces,
        replayed=replayed,
        adjusts_places=generator.adjusts_places,
        leaves_room=generator.leaves_room,
    )


async def _context(stack: AsyncExitStack, generator: "BaseGenerator") -> JobContext:
    """Open the job's buffer link and engine pool. Raises ``RunGone``."""
    clock = ActiveClock(SystemClock())
    clock.run(True)
    link = connect_link(generator.remote_buffer_url)
    stack.push_async_callback(link.close)
    reporter = Reporter(link, clock)
    pool = await stack.enter_async_context(await _pool(generator, reporter.note_waiting))
    plan = await link.plan(_fallback_plan(generator))
    if plan.groups_per_step is not None and not link.has_feed:
        raise InvalidInput("groups_per_step needs a Forebay server: this buffer does not report weight versions")
    if plan.scheduler is not None:
        pool.on_found = partial(check_engines, plan.scheduler, pool.urls)
    return JobContext(
        plan=plan,
        link=link,
        pool=pool,
        reporter=reporter,
        clock=clock,
        hold=StepBarrier(plan.groups_per_step, clock, generator.engine_wait_s),
        loads=EngineLoads(generator.num_process, addresses=pool.addresses),
        tracer=_tracer_of(plan.run_id),
        queue_size=generator.queue_size,
        num_reward_workers=generator.num_reward_workers,
    )


async def _replayed(
    stack: AsyncExitStack,
    generator: "BaseGenerator",
    context: JobContext,
    schedule: Schedule,
    reward_func: RewardFunc,
) -> ReplayedGroups | None:
    """Open the source of recorded samples, if the run is a replay. Raises ``InvalidInput``."""
    replay = context.plan.replay
    if replay is None:
        return None
    rejudge = None
    if replay.judges_again:
        check_judge(reward_func)
        # A separate one: with workers, this process has no other rewarder.
        rewarder = await stack.enter_async_context(_rewarder(generator, reward_func, generator.num_reward_workers))
        num_retries = generator.retry_budgets[RolloutOutcome.JUDGE_FAILURE]
        rejudge = Rejudge(rewarder, num_retries=num_retries, at_once=generator.num_process)
    writer = context.link.writer(min(context.queue_size, REPLAYED_AHEAD))
    stack.push_async_callback(writer.stop)
    parts = ReplayParts(context.plan, context.link, writer, context.reporter, context.hold, rejudge)
    if replay.groups is None:
        return ReplayedGroups(schedule.groups(), replay, parts)
    chosen = await asyncio.to_thread(schedule.chosen, replay.groups)
    if schedule.num_unknown:
        what = "recorded groups are left out: their instances are not in the input file"
        logger.warning("%d of %d %s", schedule.num_unknown, len(replay.groups), what)
    context.reporter.totals.num_groups_total = len(replay.groups) - schedule.num_unknown
    return ReplayedGroups(iter(chosen), replay, parts)


def _places_here(
    stack: AsyncExitStack,
    context: JobContext,
    generator: "BaseGenerator",
    rollout_func: "RolloutFunc",
    rewarder: Rewarder,
) -> JobPlaces:
    runner = _runner(generator, rollout_func, context.pool, rewarder, context.plan.run_id)
    stack.push_async_callback(runner.close)
    traces = RolloutTraces(context.tracer, context.plan.run_id)
    writer = context.link.writer(context.queue_size, traces.note_judged)
    # A completed job has closed it already; after an error, nothing more is sent.
    stack.push_async_callback(writer.stop)
    return JobPlaces(context.pool, runner, writer, traces)


@asynccontextmanager
async def _member_parts(
    generator: "BaseGenerator",
    rollout_func: "RolloutFunc",
    reward_func: RewardFunc,
    share: MemberShare,
    on_waiting: Callable[[bool], None],
) -> AsyncIterator[MemberParts]:
    """Open a worker's resources for running rollouts. The lead keeps the plan, the rows and the reports."""
    async with AsyncExitStack() as stack:
        rewarder = await stack.enter_async_context(_rewarder(generator, reward_func, share.num_reward_workers))
        link = connect_link(generator.remote_buffer_url)
        stack.push_async_callback(link.close)
        pool = await stack.enter_async_context(await _pool(generator, on_waiting))
        runner = _runner(generator, rollout_func, pool, rewarder, share.plan.run_id)
        stack.push_async_callback(runner.close)
        traces = RolloutTraces(_tracer_of(share.plan.run_id), share.plan.run_id, share.worker)
        writer = link.writer(share.queue_size, traces.note_judged)
        stack.push_async_callback(writer.stop)
        watch = _watch_loop(stack, traces.tracer)
        yield MemberParts(pool, runner, writer, traces, watch, link.takes_failed, generator.engine_wait_s)


def _watch_loop(stack: AsyncExitStack, tracer: Tracer) -> StallWatch:
    watch = StallWatch()
    watch.add(tracer.note_stall)
    watch.start()
    stack.callback(watch.stop)
    return watch


def _rewarder(generator: "BaseGenerator", reward_func: RewardFunc, num_workers: int) -> Rewarder:
    return Rewarder(reward_func, timeout_s=generator.reward_timeout_s, num_workers=num_workers)


def _runner(
    generator: "BaseGenerator", rollout_func: "RolloutFunc", pool: EnginePool, rewarder: Rewarder, run_id: str
) -> "RolloutRunner":
    # Imported here: it loads openai, half of a run process's imports, which a lead does not need.
    from forebay.generators.rollouts.attempts import RolloutRunner, RolloutSettings

    settings = RolloutSettings(generator.sampling_params, generator.retry_budgets)
    return RolloutRunner(rollout_func, pool, rewarder, settings, run_id, generator.sample_arrays)


def _tracer_of(run_id: str) -> Tracer:
    """Return the tracer of this process if it traces ``run_id``, else ``NO_TRACE``."""
    tracer = run_tracer()
    return tracer if tracer.run_id == run_id else NO_TRACE


def connect_link(url: str) -> Link:
    """Return a ``ServerLink`` if ``url`` ends in ``/w/{run_key}``, else a ``SlimeLink``. Raises ``InvalidInput``."""
    if not is_http_url(url):
        raise InvalidInput(f"remote_buffer_url must be an http address (got {url!r:.200})", field="remote_buffer_url")
    return ServerLink(url) if re.search(r"/w/[^/]+/?$", url) else SlimeLink(url)


async def _pool(generator: "BaseGenerator", on_waiting: Callable[[bool], None]) -> EnginePool:
    path = generator.template_path
    return EnginePool(
        generator.remote_engine_url,
        api_key=generator.api_key,
        model=generator.model,
        on_waiting=on_waiting,
        policy_models=generator.policy_models,
        arrays=generator.arrays,
        template=await asyncio.to_thread(load_template, path) if path is not None else None,
    )


def _fallback_plan(generator: "BaseGenerator") -> Plan:
    return Plan(
        generator.run_id or new_run_id(),
        generator.num_repeat_per_sample,
        generator.group_timeout_s,
        generator.group_deadline_s,
        oversampling=generator.oversampling,
        scheduler=generator.scheduler,
        captures=generator.capture,
    )
