"""The Python API for trainers and for generators that run elsewhere: read batches, write samples.

``trainer/`` reads batches under leases, acks, checkpoints and announces weight versions (``BufferClient``,
``AsyncBufferClient``), also for several runs (``MixedClient``); ``model`` has the data that it returns,
``batch_metrics`` numbers about a batch, ``notebook`` its table in a notebook. ``tensors/`` makes padded tensors of a
batch, ``tinker`` makes Tinker's datums, ``slime/`` is slime's rollout function, ``trl/`` has the arguments of TRL's
trainers, and ``verl/`` the classes that verl loads. ``sample_writer/`` writes samples (``SampleWriter``,
``AsyncSampleWriter``).

All of them use ``calls/``, the HTTP client for Forebay's server, as do the command line, run processes and the gateway.
Each protocol is written once, without I/O, as a flow of calls, and run by a blocking or an awaited driver. ``errors``
has the errors that arise in the client itself.

It needs httpx and msgspec alone. Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.client.errors import ClientClosed, SamplesRefused, ServerUnreachable, WriterClosed
    from forebay.client.model import (
        Batch,
        CheckpointInfo,
        CheckpointResult,
        EnginePause,
        Evaluation,
        Group,
        RewindResult,
        RunStats,
        WeightUpdate,
    )
    from forebay.client.sample_writer.outbox import Limits
    from forebay.client.sample_writer.writer import AsyncSampleWriter, SampleWriter
    from forebay.client.trainer.async_buffer_client import AsyncBufferClient
    from forebay.client.trainer.buffer_client import BufferClient
    from forebay.client.trainer.mixed_client import MixedClient
    from forebay.client.trainer.read_arrays import Image
    from forebay.core.parts import Rows

__all__ = [
    "AsyncBufferClient",
    "AsyncSampleWriter",
    "Batch",
    "BufferClient",
    "CheckpointInfo",
    "CheckpointResult",
    "ClientClosed",
    "EnginePause",
    "Evaluation",
    "Group",
    "Image",
    "Limits",
    "MixedClient",
    "RewindResult",
    "Rows",
    "RunStats",
    "SampleWriter",
    "SamplesRefused",
    "ServerUnreachable",
    "WeightUpdate",
    "WriterClosed",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncBufferClient": "forebay.client.trainer.async_buffer_client",
        "AsyncSampleWriter": "forebay.client.sample_writer.writer",
        "Batch": "forebay.client.model",
        "BufferClient": "forebay.client.trainer.buffer_client",
        "CheckpointInfo": "forebay.client.model",
        "CheckpointResult": "forebay.client.model",
        "ClientClosed": "forebay.client.errors",
        "EnginePause": "forebay.client.model",
        "Evaluation": "forebay.client.model",
        "Group": "forebay.client.model",
        "Image": "forebay.client.trainer.read_arrays",
        "Limits": "forebay.client.sample_writer.outbox",
        "MixedClient": "forebay.client.trainer.mixed_client",
        "RewindResult": "forebay.client.model",
        "Rows": "forebay.core.parts",
        "RunStats": "forebay.client.model",
        "SampleWriter": "forebay.client.sample_writer.writer",
        "SamplesRefused": "forebay.client.errors",
        "ServerUnreachable": "forebay.client.errors",
        "WeightUpdate": "forebay.client.model",
        "WriterClosed": "forebay.client.errors",
    },
)
