"""From the attempts of a trace, or of verl's profile log, to a report that names causes.

``load`` (``load_trace.py``) makes a ``timeline.py`` of either: steps with their requests, turns and events, whatever
wrote them. ``analyse`` (``make_report.py``) goes over it step by step, with ``step_summary.py`` and
``critical_path.py`` for each. Out goes a ``report.py``::

    from forebay.telemetry.analysis import analyse, load

    report = analyse(load("runs/run-…/trace"), step="67")

Of a trace, ``trace_index.py`` holds what is beside its rollouts, and ``step_plan.py`` says which reads and groups make
a step. Of verl's log, ``verl_log.py`` finds the steps, ``verl_lines.py`` reads lines, and ``verl_attempts.py`` makes
attempts of them. Of attempts, whoever wrote them, ``requests.py`` makes requests, with ``attempt_events.py``.

``completion.py`` says how requests came to their ends, and when none did, ``what_if.py`` what lower caps would have
saved, ``general_sentences.py`` what is true of all steps; ``findings/`` names causes. ``robust.py`` has their
statistics, ``intervals.py`` what stretches of time cover. ``compare.py`` sets reports side by side.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.telemetry.analysis.load_trace import load as load
    from forebay.telemetry.analysis.make_report import analyse as analyse

__all__ = ["analyse", "load"]

__getattr__ = lazy_names(
    __name__,
    {"analyse": "forebay.telemetry.analysis.make_report", "load": "forebay.telemetry.analysis.load_trace"},
)
