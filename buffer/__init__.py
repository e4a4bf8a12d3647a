"""The buffer: every run with its samples, groups and batches, in memory and on the disk. It knows no HTTP.

Its input is samples (``write``), announcements of run processes, and trainers' calls; its output is batches of groups.

- ``buffer.py``: all runs over one store; the timer; disk failures and recovery.
- ``run_buffer.py``: one run, with its clock and hooks, and the only way to record a change of it.
- ``admission.py``: decides about each sample: duplicate, late, no room (back-pressure), or a place in a group.
  ``same_uid.py``: a different body under a known uid.
- ``run_warnings.py``: warnings about a running run.
- ``batches.py``: which batches were handed out, which checkpoint holds which, and which may be evicted from memory.
- ``evicted_rows.py``: which done groups and batches are evicted from memory, and how they are looked up.
- ``groups/``: groups with their samples, the order of delivery, meta info, the alarm.
- ``change_records.py``: what a run's trace records about its groups and batches.
- ``deadlines.py``: all time-outs: of groups, leases, stalled runs, ended runs.
- ``idle_groups.py``: which groups do not age, as reported by their run process.
- ``reads/``: which groups a reader gets, the hooks' verdicts, and the rows.
- ``leases/``: which trainer has which batch; acknowledging, releasing, extending; checkpoints and rewind.
- ``resume.py``: a trainer that reconnects with a list of finished ids. ``restore.py``: loading what is stored after a
  restart, and reading delivered samples back.
- ``parts.py``: finds the stored parts of samples. ``notes.py``: a trainer's notes about samples.
- ``journal_source.py``: a run as a recording, for replay or export. ``replay_feed.py``: writes a recording into
  a run; ``recorded_group.py``: one group of it. ``rehearsal.py``: simulates a recorded group under other hooks
  or settings; ``rehearsed_groups.py``: all groups of a recording, and when their samples arrive.
- ``retention.py``, ``retention_rules.py``: which stored segments may be removed, and removing them.
- ``store/``: the journal on disk, its index, and an in-memory store for tests.

One rule holds everywhere: a change happens in memory at once, without awaiting in between, and is one append to the
store. The caller is answered when the append is on disk. When an append fails, memory is ahead of the disk: nothing
more is decided (``check_storage``) until everything has been loaded again. Code that calls hooks or chooses groups
holds the run's lock. Writes never do, except those of a recording, so anything awaited under the lock is checked again
afterwards.
"""

from forebay.core.lazy_names import require_extra

require_extra("server", "xxhash")
