"""Generators turn task rows into samples. This package has the files that users write and the processes that run them.

This folder itself contains what users read and copy. ``math_generator.py`` and ``tool_generator.py`` are complete
generators; ``slime_generate_generator.py`` runs functions written for slime, ``verifiers_generator.py`` tasksets and
``harbor_generator.py`` tasks of Harbor. ``BaseGenerator`` in ``base.py`` turns rows and two functions into samples, and
``agent.py`` runs unchanged agents. ``tools.py``, ``sandbox/`` and ``failures.py`` (kinds of failure) help to write
them; ``rewards.py`` runs reward functions with a time limit.

Its subfolders, in the order of a run:

- ``discovery/`` finds generator files for the server, and inspects each in a temporary process;
- ``process/``: the processes that the server starts, a monitor and the main that calls ``run_rollout``;
- ``job/`` passes over the rows. ``base.py`` calls ``job/run_job.py``, which opens engines, buffer and rewards;
- ``rollouts/`` runs each rollout: its group, attempts, client, recorded calls and samples;
- ``agents/`` runs rollouts that are separate programs behind the gateway;
- ``environments/`` runs environments whose libraries need a Python of their own;
- ``buffer_link/``: the connection to the buffer, Forebay's own or slime's.

Imports go downwards: ``base`` and ``agent`` > ``job`` | ``agents`` > ``rollouts`` > ``buffer_link``. Most imports of a
generator file are inspections, so slow modules (engines, pydantic) are imported where they are used.
"""

from forebay.core.lazy_names import require_extra

require_extra("server", "openai")
