"""Findings about the time of steps: one cause each, and the wording.

For a step, ``request_outliers.py`` finds requests that took longer than comparable ones, given the time that
``engine_rates.py`` expects for their tokens, and ``request_causes.py`` finds out why. ``late_workers.py`` finds the
worker that the others waited for. ``step_findings.py`` collects everything that cost the step time. ``run_findings.py``
has what shows only across all steps. ``wording.py`` has the texts.
"""
