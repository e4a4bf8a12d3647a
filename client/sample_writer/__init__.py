"""What a generator elsewhere writes with; run processes write with it too.

``writer.py`` has the two faces, one blocking and one awaited. ``write`` encodes a sample (``encode.py``: token arrays
as raw numbers, the rest as JSON) and puts it into the outbox, once there is room: ``outbox.py`` knows what waits, what
is under way, when the next batch is due, and what became of each sample. In the background a flow (``Writing`` in
``protocol.py``, over ``client/calls``) takes batches out, offers each until the buffer has judged every sample of it,
and notes the verdicts: acknowledged, to be offered again, or refused. A batch that is refused as a whole is offered in
halves, until the sample that is to blame stands alone.

A writer that speaks with another buffer, or never gives up, derives from ``Writing`` and goes over an open transport
with ``AsyncWriter``: ``generators/buffer_link`` does.
"""
