"""The clients of a trainer: batches, leases, checkpoints, weight versions.

``buffer_client.py`` holds the blocking client and ``async_buffer_client.py`` the awaited one. Both pass each method to
a ``Reading`` (``requests.py``, and ``run_requests.py`` for the run and its engines). A ``Reading`` describes requests
and handles replies as flows (``client/calls``): it does no I/O and reads no clock. ``read_arrays.py`` reads the parts
of samples: arrays and images. ``annotate.py`` queues notes about samples and sends them. ``marked_steps.py`` makes the
steps of a trainer checkpoints of its run, for the adapters in ``client/``.

``mixed_client.py`` is a client of several runs: ``shares.py`` decides how many groups of each a batch has, and
``mixed_batch.py`` makes one batch of theirs.

The life of a batch: ``Reading.read`` requests it under a ``request_id``, which ``leases.py`` remembers until the reply
is taken. If the reply is lost or the reader cancelled, the request is repeated under the same id and returns the same
batch. Batches whose reply was never taken are released when the client closes. Once a batch is taken, a thread or task
of the client extends its lease until a checkpoint, an ack or a release ends it. A lost lease is raised at the next call
that concerns batches.
"""
