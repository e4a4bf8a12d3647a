"""The Python API for trainers and for generators that run elsewhere: read batches, write samples.

``trainer/`` reads batches under leases, acks, checkpoints and announces weight versions (``BufferClient``,
``AsyncBufferClient``); ``model`` has the data that it returns. ``tensors/`` makes padded tensors of a batch, and
``slime/`` is slime's rollout function. ``sample_writer/`` writes samples (``SampleWriter``, ``AsyncSampleWriter``).

All of them use ``calls/``, the HTTP client for Forebay's server, as do the command line, run processes and the gateway.
Each protocol is written once, without I/O, as a flow of calls, and run by a blocking or an awaited driver. ``errors``
has the errors that arise in the client itself.
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
