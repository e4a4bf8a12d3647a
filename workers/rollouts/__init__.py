"""Runs over workers: the run process leads, and each worker runs rollouts that the lead calls.

A rollout is one awaited call of a ``RolloutWorker`` (``Order`` → ``Done``), and the delivery of its samples another.
``orders`` has what the calls carry.

In the lead, ``lead`` is what a job finds in place of rollouts of its own. A ``remote_job`` gives it the parts of
``remote_runner``, ``remote_engines`` and ``remote_traces``; a ``remote_rollout`` is what these know of one rollout. The
``supervisor`` has the workers, each a ``run_worker``, and replaces those that die; ``start_workers`` says how.

In a worker, ``rollout_worker`` calls the user's ``run_rollout`` in a thread. A job that this would begin is a
``member_job``, which runs each rollout as a ``member_rollout`` and sends its samples to the buffer itself.

On a cluster, ``shipped_code`` is the run's copy of its code for nodes that have not got it, ``sent_traces`` are what
workers there record, and ``reach`` says whether they reach what they need.
"""
