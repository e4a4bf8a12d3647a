"""What cost the time of steps: findings with one cause each, and the words for them.

Of a step, ``request_outliers.py`` finds the requests that took longer than their like, by what ``engine_rates.py`` says
that their tokens need, and ``request_causes.py`` why; ``late_workers.py`` the worker that the others waited for;
``step_findings.py`` all that cost the step its time. ``run_findings.py`` has what shows only over all steps.
``wording.py`` has their words.
"""
