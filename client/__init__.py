"""What a trainer, or a generator that runs elsewhere, imports: batches out of the buffer, samples into it."""

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
