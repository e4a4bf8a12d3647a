"""The gateway's state of runs.

- ``registry.py``: issues, finds and revokes all keys. For each request it identifies the caller: the server, a run,
  the agent of a rollout, or a captured run.
- ``run.py``: one run: its engines, its connection to the server, its clock, its open and its closed rollouts.
- ``rollouts.py``: an open rollout with its key and its record; records of closed rollouts, for repeated requests;
  names of capped rollouts.
- ``sessions.py``: state shared by the calls under one base URL: engine, deadline, defaults, order of the record.
- ``reasoning.py``: puts reasoning that agents dropped back into their histories.
- ``captured_run.py``: a run whose generator does not know the gateway; each call is a session of its own.
  ``conversations.py`` finds the recorded turns of written samples, and the calls of a closed group.
- ``buffer_link.py``: the connection to the server: sends samples and reports; receives closed groups, steps and pauses.
- ``run_trace.py``: records the run's time, session by session: turns, waiting, engine calls.
  ``captured_traces.py`` keeps the spans of captured calls until a sample shows which rollout they belong to.
- ``notes.py``: counts call features that the record does not contain, by kind.
- ``worker_versions.py``: the weight versions of the workers, requested once for all streams.

The server registers a run, the run opens rollouts, and their agents make calls, each with a key. The gateway returns
the records of closed rollouts, and writes the samples of captured runs with their tokens.
"""
