"""Groups in memory. Everything here is pure: time is an argument, and nothing is stored or awaited.

``sample_group.py`` is a group with its samples and its age. ``groups.py`` keeps all lists of groups in step with their
states: by id and by instance, changed since the hooks were asked, closed, not yet reported.
``admission.py`` above adds samples. ``move`` is the only way to change a state, following the table of transitions in
``core/group.py``:

    open ──▶ ready ──▶ leased ──▶ acked        (back to ready by expiry, release, rewind, resume)
      └────────┴──▶ discarded, for a reason

``ready_queue.py`` keeps the order of delivery and finds groups of old weights. ``meta_info.py`` keeps the numbers of a
reply without scanning the backlog. ``alarm.py`` detects that groups in a row end undelivered, or that too many
are lost, and why. ``known_uids.py`` has the uids in memory, and which groups to evict first. Group
time-outs are in the buffer's ``deadlines.py``.
"""
