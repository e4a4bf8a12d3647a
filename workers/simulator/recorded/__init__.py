"""From a log to a run that can be simulated: a trace of ours, or verl's profile log.

``read_logs.py`` makes a ``rollout_log.py`` of either. ``log_facts.py`` says what it is like: how much answers to one
prompt differ, and what a probe would have told. ``engine_fit.py`` makes models of its engines, out of their
``engine_traffic.py``; ``recorded_scenario.py`` runs the log again on them, and says how well that is what was recorded.
"""
