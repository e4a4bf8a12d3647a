"""Names what steps waited for: one ranked list of contributions to their critical paths.

``kinds.py`` has the one table of phases: the cause of each, and when it is worth a finding. ``engine_book.py`` compares
engines with each other, and ``engine_totals.py`` sums up all steps. ``request_excess.py`` says what a request that
ended last spent beyond the usual, and ``explain_step.py`` turns that into the findings of a step. ``step_findings.py``
has what costs a step as a whole. ``step_trends.py`` compares steps with each other, ``failures.py`` counts what failed,
and ``wording.py`` has the texts.
"""
