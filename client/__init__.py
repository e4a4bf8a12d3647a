"""What a trainer, or a generator that runs elsewhere, imports: batches out of the buffer, samples into it.

``trainer/`` reads: batches under leases, acks, checkpoints, weight versions (``BufferClient``, ``AsyncBufferClient``);
what it hands out is in ``model``. ``tensors/`` makes padded tensors of a batch, ``slime/`` is slime's rollout function
over the same clients. ``sample_writer/`` writes (``SampleWriter``, ``AsyncSampleWriter``).

All of them ask by ``calls/``, the one HTTP client of our own server, which the command line, run processes and the
gateway have as well. A protocol is written once, without I/O, as a flow of calls; a blocking and an awaited driver make
them. What goes wrong here, and not at the server, is in ``errors``.
"""

from forebay.client.errors import ClientClosed, SamplesRefused, ServerUnreachable, WriterClosed
from forebay.client.model import (
    Batch,
    CheckpointInfo,
    CheckpointResult,
    EnginePause,
    Group,
    RewindResult,
    RunStats,
    WeightUpdate,
)
from forebay.client.sample_writer.outbox import WriteLimits as Limits
from forebay.client.sample_writer.writer import AsyncSampleWriter, SampleWriter
from forebay.client.trainer.async_buffer_client import AsyncBufferClient
from forebay.client.trainer.buffer_client import BufferClient

__all__ = [
    "AsyncBufferClient",
    "AsyncSampleWriter",
    "Batch",
    "BufferClient",
    "CheckpointInfo",
    "CheckpointResult",
    "ClientClosed",
    "EnginePause",
    "Group",
    "Limits",
    "RewindResult",
    "RunStats",
    "SampleWriter",
    "SamplesRefused",
    "ServerUnreachable",
    "WeightUpdate",
    "WriterClosed",
]
