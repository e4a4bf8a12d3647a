"""Runs over workers: the run process leads, and each worker runs rollouts that it is assigned.

In the lead, ``lead`` is what a job finds in place of rollouts of its own: a ``placed_job`` gives it a
``placed_runner``, a ``placed_writer``, ``placed_engines`` and ``placed_traces``, which know of each rollout what a
``placed_rollout`` holds. The ``worker_set`` has the workers, each a ``placed_worker`` at the end of a ``worker_line``,
and starts others for those that die; ``start_workers`` says how.

On a cluster, ``shipped_code`` is the run's copy of its code for nodes that have not got it, ``sent_traces`` are what
workers there record, and ``reach`` says whether they reach what they need.

In a worker, ``rollout_worker`` calls the user's ``run_rollout`` in a thread. Where that would begin a job, a
``run_member`` waits for the lead's: a ``member_job`` runs what is assigned as ``member_rollout``, and sends the samples
that get a slot to the buffer itself. Between both lies a ``mailbox``; ``messages`` says what passes.
"""
