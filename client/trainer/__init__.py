"""What a trainer reads with: batches, leases, checkpoints, weight versions.

``buffer_client.py`` and ``async_buffer_client.py`` are the two faces, one blocking and one awaited; they differ in
nothing but how they wait. Both hand each method to a ``Reading`` (``requests.py``), which says as a flow
(``client/calls``) what goes to the server and what comes of the answer, without I/O and so without a clock of its own.

A batch goes this way: ``Reading.read`` asks for it under a ``request_id`` that ``leases.py`` remembers until the
answer is taken. So a request whose answer was lost, or whose reader was cancelled, is repeated under the same id and
brings the same batch; and what went out to nobody is given back when the client is left. Once taken, the batch is noted
there as well. A thread or task of the client follows the due times of its lease, until a checkpoint, an ack or a
release ends it. A lease that was lost is raised at the next call that has to do with batches.
"""
