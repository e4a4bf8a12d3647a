"""One passage of a generator over its rows: what it takes is opened in order, used, and closed again."""

import asyncio
import logging
import re
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from forebay.core.addresses import is_http_url
from forebay.core.clock import ActiveClock, SystemClock
from forebay.core.errors import InvalidInput
from forebay.core.ids import new_run_id
from forebay.engines.chat_template import load_template
from forebay.engines.ring import EngineRing
from forebay.generators.buffer_link.abc import Link, Plan, RunGone
from forebay.generators.buffer_link.forebay import ServerLink
from forebay.generators.buffer_link.slime import SlimeLink
from forebay.generators.job.input_rows import RowFile
from forebay.generators.job.job import JobParts, RolloutJob
from forebay.generators.job.reporter import Reporter, Totals
from forebay.generators.job.schedule import Schedule
from forebay.generators.rewards import Rewarder, RewardFunc
from forebay.generators.rollouts.attempts import RolloutFunc, RolloutRunner, RolloutSettings
from forebay.generators.rollouts.open_group import Hold

if TYPE_CHECKING:
    from forebay.generators.base import BaseGenerator

logger = logging.getLogger(__name__)


async def run(
    generator: "BaseGenerator", rows: RowFile, epochs: range, rollout_func: RolloutFunc, reward_func: RewardFunc
) -> Totals:
    """Pass over the rows until the buffer has every sample, or the run was stopped."""
    async with AsyncExitStack() as stack:
        try:
            parts = await _open(stack, generator, rows, epochs, rollout_func, reward_func)
        except RunGone as error:
            logger.info("nothing to do: %s", error)
            return Totals(is_stopped=True)
        logger.info("%s, run %s: %d epochs of %s", generator.task_type, parts.plan.run_id, len(epochs), rows.path)
        return await RolloutJob(parts).run()


async def _open(
    stack: AsyncExitStack,
    generator: "BaseGenerator",
    rows: RowFile,
    epochs: range,
    rollout_func: RolloutFunc,
    reward_func: RewardFunc,
) -> JobParts:
    clock = ActiveClock(SystemClock())
    clock.run(True)
    rewarder = Rewarder(reward_func, timeout_s=generator.reward_timeout_s, num_workers=generator.num_reward_workers)
    await stack.enter_async_context(rewarder)
    link = connect_link(generator.remote_buffer_url)
    stack.push_async_callback(link.close)
    reporter = Reporter(link, clock)
    ring = await stack.enter_async_context(await _ring(generator, reporter))
    plan = await link.plan(_fallback_plan(generator))
    if plan.groups_per_step is not None and not link.has_feed:
        raise InvalidInput("groups_per_step needs a Forebay server: this buffer tells no weight versions")
    schedule = Schedule(rows, epochs, plan, generator.listed_ids)
    # It reads the whole file, and the engines' breaker must go on reporting meanwhile.
    reporter.totals.num_groups_total = await asyncio.to_thread(schedule.num_groups_total)
    settings = RolloutSettings(generator.sampling_params, generator.retry_budgets)
    runner = RolloutRunner(rollout_func, ring, rewarder, settings, plan.run_id)
    stack.push_async_callback(runner.close)
    writer = link.writer(generator.queue_size)
    # A job that came to its end has closed it; after an error nothing more is sent.
    stack.push_async_callback(writer.stop)
    hold = Hold(plan.groups_per_step)
    return JobParts(plan, schedule, link, ring, runner, writer, reporter, clock, hold, generator.num_process)


def connect_link(url: str) -> Link:
    """A ``ServerLink`` for an address that ends in ``/w/{run_key}``, else a ``SlimeLink``. Raises ``InvalidInput``."""
    if not is_http_url(url):
        raise InvalidInput(f"remote_buffer_url must be an http address, got {url!r:.200}", field="remote_buffer_url")
    return ServerLink(url) if re.search(r"/w/[^/]+/?$", url) else SlimeLink(url)


async def _ring(generator: "BaseGenerator", reporter: Reporter) -> EngineRing:
    path = generator.template_path
    return EngineRing(
        generator.remote_engine_url,
        api_key=generator.api_key,
        model=generator.model,
        on_waiting=reporter.note_waiting,
        template=await asyncio.to_thread(load_template, path) if path is not None else None,
    )


def _fallback_plan(generator: "BaseGenerator") -> Plan:
    return Plan(
        generator.run_id or new_run_id(),
        generator.num_repeat_per_sample,
        generator.group_timeout_s,
        generator.group_deadline_s,
        oversampling=generator.oversampling,
        captures=generator.capture,
    )
