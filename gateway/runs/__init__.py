"""What the gateway knows of runs.

- ``registry.py``: every key is issued, found and revoked here. It answers "who calls?" for each request: the server, a
  run, the agent of a rollout, or a captured run.
- ``run.py``: one run: its engines, its connection to the server, its clock, its open and its closed rollouts.
- ``rollouts.py``: an open rollout, with its key and its record; the records of those that were closed, for callers who
  ask again, and the names of those that came to their caps.
- ``sessions.py``: what the calls under one base URL share: engine, deadline, defaults, and the order of their record.
- ``captured_run.py``: a run whose generator knows nothing of the gateway; each of its calls is a session of its own.
  ``conversations.py`` finds the recorded turns of the samples that it writes, and the calls of a closed group.
- ``buffer_link.py``: the way to the server: samples and reports go out; closed groups, steps and standstills come in.
- ``run_trace.py``: what is recorded of the run's time, session by session: turns, waiting, engine calls.
  ``captured_traces.py`` keeps the spans of captured calls until a sample says which rollout they were of.
- ``notes.py``: what calls had that the record does not hold, counted by kind.
- ``worker_versions.py``: which weights the workers have, asked once for all streams.

In come a registration from the server, then rollouts that the run opens, then calls of their agents, each with a key.
Out go the records of closed rollouts, and the samples of captured runs with their tokens.
"""
