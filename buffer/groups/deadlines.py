"""What time brings about: groups past their deadline are closed, and runs that are over end."""

import logging

from forebay.buffer.groups.alarm import alarm_text
from forebay.buffer.reads.judging import Pipeline
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.group import GroupState
from forebay.core.run import WORKING, RunState

logger = logging.getLogger(__name__)

TICK_RECORD_S = 5.0
"""How much of the counted time a crash may lose."""


async def advance(buffer: RunBuffer, pipeline: Pipeline) -> None:
    """Do what is due in one run. Raises ``StorageFailed`` when the end of the run cannot be stored."""
    run = buffer.run
    if run.has_ended or buffer.has_failed:
        return
    buffer.record_tick(TICK_RECORD_S)
    if run.state not in WORKING or buffer.groups.is_any_due(buffer.active.now_s()):
        async with buffer.lock:
            buffer.check_storage()
            await pipeline.expire(buffer.groups.overdue(buffer.active.now_s(), run.process_ended_s))
            await _settle(buffer, pipeline)
    _watch_progress(buffer)
    if _is_over(buffer):
        run.has_ended = True
        buffer.active.run(False)
        await buffer.save_run()
        buffer.hooks.notify("run_ended", run_id=run.run_id, state=run.state.value, reason=run.reason)
        logger.info("run %s (%s) has ended: %s", run.run_id, run.task_type, run.state.value)


async def _settle(buffer: RunBuffer, pipeline: Pipeline) -> None:
    """After the process: judge what is full, and close what its generator has said it will not fill."""
    run = buffer.run
    if run.state in WORKING:
        return
    await pipeline.evaluate()
    if run.state is RunState.FINISHED and run.is_last_slot_reported:
        await pipeline.expire(buffer.groups.in_state(GroupState.OPEN))


def _is_over(buffer: RunBuffer) -> bool:
    run = buffer.run
    if run.state in WORKING or buffer.groups.is_any(GroupState.OPEN):
        return False
    if run.state is not RunState.FINISHED or run.is_last_slot_reported:
        return True
    last_s = max(run.process_ended_s or 0.0, buffer.last_sample_s)
    return buffer.active.now_s() - last_s >= run.settings.group_timeout_seconds


def _watch_progress(buffer: RunBuffer) -> None:
    idle_s = buffer.active.now_s() - buffer.last_progress_s
    reasons = buffer.alarm
    if reasons is not None and not buffer.is_alarmed:
        logger.warning("run %s: %s", buffer.run.run_id, alarm_text(reasons))
    buffer.is_alarmed = reasons is not None
    if buffer.run.state is RunState.RUNNING and not buffer.is_stalled:
        buffer.is_stalled = idle_s >= buffer.run.settings.group_deadline_seconds
        if buffer.is_stalled:
            logger.warning("run %s made no progress for %.0f s", buffer.run.run_id, idle_s)
