"""Agents as rollouts: programs that call the gateway instead of using a client of ours.

``rollouts.py`` is the rollout function. It opens a rollout at the gateway (``gateway.py``), and gives the agent its
``task.py`` (row, addresses, key, folder). It runs the agent within its time limit (``run.py``) and closes the rollout.
The gateway's record contains the trajectory for the samples, or the failures. ``verifier.py`` runs a command in the
agent's folder to get the reward.
"""
