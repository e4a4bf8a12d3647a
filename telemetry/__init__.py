"""Observes a process: logs (``log``; ``visible_text`` makes their entries safe), metrics for Prometheus (``metrics``),
and the output of child processes (``output_file``). ``numbers`` formats figures for people.

``tracing/`` records where the time of rollouts goes. ``trace_db`` reads traces, with the ``attempts`` of rollouts;
``analysis/`` makes a report, ``render/`` shows it, and ``export/`` writes traces in other formats. For user code:
``span``, ``traceparent``, and ``EventLog`` (``event_log``), which writes verl's profile log.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.telemetry.event_log import EventLog
    from forebay.telemetry.tracing.tracer import span, traceparent

__all__ = ["EventLog", "span", "traceparent"]

# Every process imports the log, but few of them trace.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "EventLog": "forebay.telemetry.event_log",
        "span": "forebay.telemetry.tracing.tracer",
        "traceparent": "forebay.telemetry.tracing.tracer",
    },
)
