"""The job of a run process: one passage over its rows, in groups, until the buffer has every sample.

``run_job.py`` opens what the job needs, in order, and closes it again; it asks the buffer for the plan first, which
``plan_record.py`` puts into the trace, and ``composition.py`` for the policy of the run; ``ports.py`` says what the job
asks of what was opened, and what of it lies elsewhere where workers run the rollouts.

The life of a group: ``input_rows.py`` reads its row, and ``group_feed.py`` submits it to the policy, a few ahead;
``dispatcher.py`` asks the policy for every free place, announces the group before its first rollout, and starts what
was chosen; ``job.py`` runs the rollouts, and hands what they bring to the writer; ``open_groups.py`` ends what is not
needed any more: rollouts of closed groups, spares of complete ones, calls in flight when the run is held.

Where another run is replayed, ``replayed_groups.py`` comes first: what that has recorded is written, and only what is
left is submitted. With ``leftover: "defer"``, ``deferral.py`` says which groups a step begins, and keeps samples until
their group is whole. ``concurrency_limits.py`` finds out how many places there are, if nobody says. Beside them run the
feed of closed groups, the writer, and the reports (``reporter.py``: progress, costs, totals, and which groups have no
rollout in flight).

Out go samples (through ``buffer_link``) and ``Totals``. A run that the buffer has ended comes here as ``RunGone``.
"""
