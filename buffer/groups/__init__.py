"""Groups in memory. Everything here is pure: time is an argument, and nothing is stored or awaited.

``sample_group.py`` is a group with its samples and its age, ``groups.py`` has every list of them that is kept in step
with their states: by id and by instance, what changed since the hooks were asked, what closed, what is not reported.
``admission.py`` above puts samples in; ``move`` is the one way from state to state, along the table of transitions in
``core/group.py``:

    open ──▶ ready ──▶ leased ──▶ acked        (back to ready by expiry, release, rewind, resume)
      └────────┴──▶ discarded, for a reason

``ready_queue.py`` is the order of delivery, and finds groups of old weights. ``meta_info.py`` keeps the numbers of a
reply without looking at the backlog. ``alarm.py`` notices that groups end undelivered, one after the other, or that too
many are lost, and to what. ``known_uids.py`` has the uids that are in memory, and which groups leave it first. Group
time-outs are in ``deadlines.py`` of the buffer.
"""
