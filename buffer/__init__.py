"""The buffer: every run with its samples, groups and batches, in memory and on the disk. It knows no HTTP.

In come samples (``write``), what a run's process announces, and the trainer's calls; out go batches of finished groups.

- ``buffer.py``: all runs over one store; the timer; what happens when the disk fails, and recovers.
- ``run_buffer.py``: one run, with its clock and hooks, and the one way in which a change of it is recorded.
- ``admission.py``: what becomes of a sample: duplicate, late, no room (back-pressure), or a place in a group.
  ``same_uid.py``: another body under a uid that came before.
- ``run_warnings.py``: what a run is warned about while it works.
- ``batches.py``: which batches were handed out, which checkpoint holds which, and which may leave memory.
- ``evicted_rows.py``: which groups and batches leave memory when they are done with, and how they are found again.
- ``groups/``: groups with their samples, the order of delivery, meta info, the alarm.
- ``change_records.py``: what the trace of a run is told of its groups and batches.
- ``deadlines.py``: every time-out: of groups, leases, runs that stand still, runs that are over.
- ``idle_groups.py``: which groups do not age, as their run process says.
- ``reads/``: which groups a reader gets, what hooks say of them, and their rows.
- ``leases/``: who has which batch; acknowledging, releasing, extending; checkpoints and rewind.
- ``resume.py``: a trainer that comes back with a list of finished ids. ``restore.py``: what a restart does with what is
  stored, and how samples that were delivered are read back.
- ``journal_source.py``: a run as a recording, to be replayed or exported. ``replay_feed.py``: a recording, written into
  a run; ``recorded_group.py``: one group of it. ``rehearsal.py``: what would become of a recorded group by other hooks
  or settings; ``rehearsed_groups.py``: all groups of a recording, and when their samples come.
- ``retention.py``, ``retention_rules.py``: which stored segments may go, and removing them.
- ``store/``: the journal on the disk, the index beside it, and a store in memory for tests.

The rule that holds everywhere: a change is made in memory at once, without waiting in between, and is one append to the
store; whoever asked for it is answered when that is on the disk. When an append fails, memory is ahead of the disk:
nothing is decided any more (``check_storage``) until everything has been loaded again. Whoever asks hooks or chooses
groups holds the run's lock; writes never do, but those of a recording, so what was awaited under it is checked again
afterwards.
"""
