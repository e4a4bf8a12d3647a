"""Rollouts: from a group and the number of a rollout to its samples.

- ``open_group.py``: the group that a rollout belongs to: its time (``group_age.py``), its slots, its calls in flight;
  ``GroupClosed`` ends all that works for it. Engine calls wait at its ``StepBarrier`` while the run is held for its
  trainer;
- ``rollout_slot.py``: the concurrency slot of a rollout while it runs, as its policy counts it;
- ``attempts.py`` runs the rollout function, in the event loop or in a thread, attempt after attempt, and asks for the
  reward; ``rollout.py`` is what the function finds as ``client.rollout``;
- ``client.py`` is the ``openai`` client that it is given. Each call passes ``engine_calls.py`` (address, ``rid``,
  time limit, its cap, another engine when one is gone) and, if it is a chat, ``recording.py``; ``recorded_streams.py``
  for streams, ``whole_chat.py`` for replies in one piece, which go on after an abort. ``call_failures.py`` says whose
  fault it is when one fails. ``connections.py`` is what it goes over: a connection for each call under way;
- ``rollout_trace.py`` records where the time of each attempt goes, ``chat_turn.py`` that of its turns;
  ``gateway_turns.py`` puts the turns of an agent, which the gateway recorded, in their place;
- ``single_turn.py``: the rollout function for one question and one answer;
- ``samples.py`` makes samples of what was returned and recorded, or one that says why the rollout failed;
- ``replayed_samples.py`` has samples that another run recorded in place of rollouts; ``rejudging.py`` asks for the
  reward of such a rollout once more.
"""
