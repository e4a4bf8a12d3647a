"""Runs over workers: the run process is the lead, and each worker runs the rollouts that the lead requests.

A rollout is one awaited call of a ``RolloutWorker`` (``Order`` → ``Done``); delivering its samples is another.
``orders`` has the messages of these calls.

In the lead, ``lead`` starts the workers and replaces the local parts of a job. A ``remote_job`` supplies the job's
engines, its writer, and the ``remote_runner``, which tracks each rollout from its order to its sample. The
``supervisor`` owns the workers, each a ``run_worker``, and replaces those that die.

In a worker, ``rollout_worker`` calls the user's ``run_rollout`` in a thread. Each job that it begins there becomes a
``member_job``, which runs the rollouts and sends their samples directly to the buffer.

``remote_traces`` has the trace of both sides. On a cluster, ``other_nodes`` ships the run's code to nodes that lack
it, and checks that they reach the addresses they need.
"""
