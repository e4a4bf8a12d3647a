"""The job of a run process: one passage over its rows, in groups, until the buffer has every sample.

``session.py`` opens what the job needs, in order, and closes it again; it asks the buffer for the plan first.
``job.py`` then goes through the ``schedule.py`` of groups that ``input_rows.py`` reads from the file: it takes a
place for each rollout, announces the group, starts its rollouts, and hands what they bring to the writer. Beside the
rollouts run the feed of closed groups, the reports (``reporter.py``: progress, costs, totals) and the writer. Its
``OpenGroups`` end what is not needed any more: rollouts of closed groups, spares of complete ones, calls in flight
when the run is held.

Out go samples (through ``buffer_link``) and ``Totals``. A run that the buffer has ended comes here as ``RunGone``.
"""
