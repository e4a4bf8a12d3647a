"""Agents as rollouts: programs that talk to the gateway instead of to a client of ours.

``rollouts.py`` is the rollout function: it begins a rollout at the gateway (``gateway.py``), gives the agent its
``task.py`` (row, addresses, key, folder), runs it within its time (``run.py``), ends the rollout and takes the
record: the trajectory that samples are made of, or whose fault it is that there is none. ``verifier.py`` runs a command
that tells the reward, in the folder where the agent worked.
"""
