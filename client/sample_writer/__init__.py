"""Sample writers, for generators that run elsewhere and for run processes.

``writer.py`` has a blocking and an awaited writer. ``write`` encodes a sample (``encode.py``: token arrays as raw
numbers, the rest as JSON; ``encode_parts.py``: side arrays and images as parts) and queues it in the outbox once there
is room.
``outbox.py`` tracks samples that wait or are being sent, when the next batch is due, and the result for each sample. A
background flow (``Writing`` in ``protocol.py``, over ``client/calls``) takes batches and sends each until the buffer
has accepted or rejected every sample. A batch that is rejected as a whole is sent in halves, until the
invalid sample is alone.

To write to another kind of buffer or to retry without end, derive from ``Writing`` and pass it to ``AsyncWriter`` with
an open transport, as ``generators/buffer_link`` does.
"""
