"""Rollouts: from a group and the number of a rollout to its samples.

- ``open_group.py``: the group of a rollout with its deadlines (``group_age.py``), slots and calls in flight.
  ``GroupClosed`` ends everything that works for it. Engine calls wait at its ``StepBarrier`` while the run is paused;
- ``rollout_slot.py``: the concurrency slot of a running rollout, as counted by its policy;
- ``attempts.py`` runs the rollout function, in the event loop or in a thread, with retries, and requests the reward.
  ``rollout.py`` is the object that the function finds as ``client.rollout``;
- ``client.py``: the ``openai`` client of a rollout. Each call passes ``engine_calls.py`` (address, ``rid``, time
  limit, token cap, replacement of failed engines). Chats are recorded by ``recording.py``, with
  ``recorded_streams.py`` for streams and ``whole_chat.py`` for others, which are continued after an abort.
  ``call_failures.py`` classifies failures. ``connections.py`` has one connection per call in flight;
- ``rollout_trace.py`` records the time spent by each attempt, ``chat_turn.py`` that of its turns.
  ``gateway_turns.py`` merges the turns of an agent, which the gateway recorded;
- ``single_turn.py``: the rollout function for one question and one answer;
- ``samples.py`` makes samples from results and recordings, or a failed sample with the error;
- ``replayed_samples.py`` reuses samples of another run in place of rollouts; ``rejudging.py`` scores them again.
"""
