"""What is recorded of a run's plan: all that has to be known, beside its rollouts, to run it again in virtual time."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.core.addresses import engine_urls, without_login
from forebay.telemetry.tracing.records import RunPlan
from forebay.telemetry.tracing.tracer import Tracer

if TYPE_CHECKING:  # for types alone
    from forebay.core.scheduling.scheduler import Scheduler
    from forebay.generators.buffer_link.abc import Plan

logger = logging.getLogger(__name__)


def record_plan(tracer: Tracer, plan: "Plan", engines: str | Sequence[str], **of_generator: Any) -> None:
    """Write the plan of one pass over the rows into the trace; ``of_generator``: more fields of ``RunPlan``."""
    try:
        tracer.write(
            RunPlan(
                t=tracer.now(),
                group_size=plan.group_size,
                engines=[without_login(url) for url in _listed(engines)],
                scheduler=_settings(plan.scheduler) if plan.scheduler is not None else {},
                oversampling=plan.oversampling.model_dump(exclude_defaults=True) if plan.oversampling else {},
                **of_generator,
            )
        )
    except Exception as error:  # noqa: BLE001 - tracing must never cost a run
        logger.warning("the plan of this run is not in its trace: %r", error)


def _listed(engines: str | Sequence[str]) -> list[str]:
    return engine_urls({"remote_engine_url": engines if isinstance(engines, str) else list(engines)})


def _settings(scheduler: "Scheduler") -> dict[str, Any]:
    # The options of somebody else's policy may hold anything, a key too.
    settings = scheduler.model_dump(exclude_defaults=True, exclude={"options"})
    if isinstance(settings.get("heavy"), list):
        settings["heavy"] = [without_login(url) for url in settings["heavy"]]
    return settings
