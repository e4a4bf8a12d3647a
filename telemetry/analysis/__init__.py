"""Turns a trace, or verl's profile log, into a report that names causes.

``load`` (``load_trace.py``) turns either into the classes of ``timeline.py``: steps with their requests, turns and
events. ``analyse`` (``make_report.py``) examines each step with ``step_summary.py`` and ``critical_path.py``, and
returns a ``report.py``::

    from forebay.telemetry.analysis import analyse, load

    report = analyse(load("runs/run-…/trace"), step="67")

For a trace, ``step_plan.py`` decides which reads and groups make a step. For verl's log, ``verl_log.py`` finds the
steps, ``verl_lines.py`` parses lines, and ``verl_attempts.py`` builds attempts. ``requests.py`` turns attempts of
either kind into requests.

``completion.py`` describes when requests ended, and when none did; ``what_if.py`` what lower caps would have saved.
``causes/`` names causes, and ``trust.py`` hides those that rest on data that cannot be true. ``lanes.py`` has the
requests of a step over time. ``robust.py`` has statistics, ``intervals.py`` operations on intervals. ``compare.py``
compares reports.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.telemetry.analysis.load_trace import load as load
    from forebay.telemetry.analysis.make_report import analyse as analyse

__all__ = ["analyse", "load"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {"analyse": "forebay.telemetry.analysis.make_report", "load": "forebay.telemetry.analysis.load_trace"},
)
