"""Runs over workers: the run process leads, and each worker runs rollouts that the lead calls.

A rollout is one awaited call of a ``RolloutWorker`` (``Order`` → ``Done``), and the delivery of its samples another.
``orders`` has what the calls carry.

In the lead, ``lead`` starts the workers, and is what a job finds in place of rollouts of its own. A ``remote_job``
gives it its engines and its writer, and the ``remote_runner``, which follows each rollout from its order to its sample.
The ``supervisor`` has the workers, each a ``run_worker``, and replaces those that die.

In a worker, ``rollout_worker`` calls the user's ``run_rollout`` in a thread. A job that this would begin is a
``member_job``, which runs the rollouts and sends their samples to the buffer itself.

``remote_traces`` is what both record. On a cluster, ``other_nodes`` has the run's copy of its code for nodes that have
not got it, and says whether they reach what they need.
"""
