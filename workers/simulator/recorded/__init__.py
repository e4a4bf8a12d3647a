"""Turns a log, a trace of Forebay or verl's profile log, into a run that can be simulated.

``read_logs.py`` reads either into a ``rollout_log.py``. ``log_facts.py`` describes it: how much answers to one prompt
differ, and how well a probe would have predicted them. ``engine_fit.py`` fits models of its engines to their
``engine_traffic.py``. ``recorded_scenario.py`` simulates the log on these models, and compares times with the log's.
"""
