"""What is told of a process: logs (``log``; ``visible_text``, so that nothing breaks their entries), metrics for
Prometheus (``metrics``), and what a child prints (``output_file``). ``numbers`` writes figures for people.

``tracing/`` records where the time of rollouts goes. ``trace_db`` reads that back, with the ``attempts`` of rollouts;
``analysis/`` makes a report of it, ``render/`` shows that, and ``export/`` writes traces in the formats of others.
For user code: ``span``, ``traceparent``, and ``EventLog`` (``event_log``), which writes verl's profile
log.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.telemetry.event_log import EventLog
    from forebay.telemetry.tracing.tracer import span, traceparent

__all__ = ["EventLog", "span", "traceparent"]

# Every process imports the log, and few of them trace.
__getattr__ = lazy_names(
    __name__,
    {
        "EventLog": "forebay.telemetry.event_log",
        "span": "forebay.telemetry.tracing.tracer",
        "traceparent": "forebay.telemetry.tracing.tracer",
    },
)
