"""What a trainer, or a generator that runs elsewhere, imports: batches out of the buffer, samples into it."""

from forebay.client.async_buffer_client import AsyncBufferClient
from forebay.client.buffer_client import BufferClient
from forebay.client.errors import ClientClosed, SamplesRefused, ServerUnreachable, WriterClosed
from forebay.client.model import Batch, CheckpointInfo, CheckpointResult, Group, RewindResult, RunStats
from forebay.client.outbox import Limits
from forebay.client.updates import EnginePause, WeightUpdate
from forebay.client.writer import AsyncSampleWriter, SampleWriter

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
