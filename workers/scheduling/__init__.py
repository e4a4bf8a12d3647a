"""Scheduling policies choose the next rollout to start, its engine, and how much it may sample.

``pull`` is the default, ``static`` the baseline that binds each rollout to an engine in advance. ``longest_first``
orders by predicted answer length (``lengths``), from the records of earlier epochs and runs (``history``). ``probe``
runs one rollout of each group first: ``probe_ranking`` finds the long groups, ``heavy_engines`` the engines for
them, and ``rollout_line`` queues rollouts for any engine or for one. Shared parts are ``waiting_groups`` (groups that
have not begun, and how often they were overtaken) and ``started_groups`` (groups with rollouts left to start).
Settings and protocol are in ``forebay.core.scheduling``.
"""
