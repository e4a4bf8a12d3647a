"""The job of a run process: one pass over its rows, in groups, until the buffer has every sample.

``run_job.py`` opens the job's resources in order and closes them again. It gets the plan from the buffer, which
``plan_record.py`` writes to the trace, and the policy from ``composition.py``. ``ports.py`` defines the interfaces of
these resources, including those that workers replace.

The life of a group: ``input_rows.py`` reads its row, and ``group_feed.py`` submits it to the policy ahead of time.
``dispatcher.py`` asks the policy for a rollout per free slot, announces the group before its first rollout, and starts
the rollout. ``job.py`` runs it and passes its samples to the writer. ``open_groups.py`` ends what is no longer needed:
rollouts of closed groups, spares of complete ones, and calls in flight when the run is paused.

In a replay, ``replayed_groups.py`` first writes the recorded samples and submits only the rest. With
``leftover: "defer"``, ``deferral.py`` decides which groups a step begins, and keeps samples until their group is
complete. ``concurrency_limits.py`` adjusts the number of slots for ``num_process: "auto"``. In parallel run the feed of
closed groups, the writer, and ``reporter.py``, which reports progress, costs, totals and idle groups.

A job produces samples (through ``buffer_link``) and ``Totals``. ``RunGone`` means that the buffer has ended the run.
"""
