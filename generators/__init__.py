"""Generators: what turns task rows into samples, from the files that users write to the processes that run them.

In this folder itself lies what a user reads and copies: ``math_generator.py`` and ``tool_generator.py`` (generators
that are complete), ``slime_generate_generator.py`` (runs functions written for slime), ``base.py`` (``BaseGenerator``:
rows and two functions in, samples out), ``agent.py`` (the same for agents as they are), ``tools.py``, ``rewards.py``
(reward functions and their time limit), ``sandbox/`` and ``failures.py`` (whose fault a failed rollout is).

Below it, in the order of a run:

- ``discovery/`` finds generator files and inspects each in a process that is thrown away; used by the server;
- ``process/`` is what the server starts: a monitor, and below it the main that calls ``run_rollout``;
- ``job/`` passes over the rows: ``base.py`` hands over to ``job/run_job.py``, which opens engines, buffer and
  rewards;
- ``rollouts/`` makes each rollout: its group, its attempts, its client, the recorded calls, the samples;
- ``agents/`` does so where a program of its own is the rollout, behind the gateway;
- ``buffer_link/`` is the way to the buffer, Forebay's own or slime's.

Imports go down: ``base`` and ``agent`` > ``job`` | ``agents`` > ``rollouts`` > ``buffer_link``. Most imports of a
generator file are inspections, so what takes long to import (engines, pydantic) is imported where it is used.
"""
