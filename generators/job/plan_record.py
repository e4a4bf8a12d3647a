"""Record of a run's plan: everything besides its rollouts that a simulation needs to run it again."""

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
    """Write the plan of one pass over the rows to the trace; ``of_generator`` holds further fields of ``RunPlan``."""
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
        logger.warning("could not record the plan of this run in its trace: %r", error)


def _listed(engines: str | Sequence[str]) -> list[str]:
    return engine_urls({"remote_engine_url": engines if isinstance(engines, str) else list(engines)})


def _settings(scheduler: "Scheduler") -> dict[str, Any]:
    # Options of a third-party policy may contain secrets.
    settings = scheduler.model_dump(exclude_defaults=True, exclude={"options"})
    if isinstance(settings.get("heavy"), list):
        settings["heavy"] = [without_login(url) for url in settings["heavy"]]
    return settings
