"""Notes of a trainer about samples: queued, and sent in the background."""

import logging
from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.client.calls.flow import Call, Flow, answered, decoded
from forebay.client.model import Row
from forebay.client.sample_writer.encode import plain_tensor
from forebay.client.sample_writer.encode_parts import take_parts
from forebay.core.binary_sample import SAMPLES_TYPE, join_samples
from forebay.core.errors import ForebayError, InvalidInput
from forebay.core.parts import Rows, numpy_module

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

logger = logging.getLogger(__name__)

MAX_KNOWN = 1 << 18
"""Samples whose batch is remembered."""
REQUEST_NOTES = 64
RETRY_S = 2.0
TIMEOUT_S = 60.0


class NoteQueue:
    """Notes that the server has not confirmed, and the batches of the samples read. Thread-safe."""

    def __init__(self) -> None:
        self._numbers = count()
        self._queue: dict[int, tuple[str, bytes]] = {}
        """Path and frames of each note, in order."""
        self._batches: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def learn(self, path: str, rows: Iterable[Row]) -> None:
        """Remember the batch at ``path``, in which these rows were read."""
        self._batches |= {str(row.get("uid")): path for row in rows}
        while len(self._batches) > MAX_KNOWN:
            del self._batches[next(iter(self._batches))]

    def batch_of(self, uid: str) -> str:
        """The path of the batch in which a sample was read last. Raises ``InvalidInput``."""
        if uid not in self._batches:
            message = f"uid must be of a sample that this client has read (got {uid!r})"
            raise InvalidInput(message, field="uid", hint="pass the batch, or its id")
        return self._batches[uid]

    def add(self, batch_path: str, frames: bytes) -> None:
        """Queue the frames of a note about a sample of the batch at ``batch_path``."""
        self._queue[next(self._numbers)] = f"{batch_path}/annotations", frames

    def send(self, retry_for_s: float = 0.0) -> Flow[bool]:
        """Send the oldest notes. Returns False if the server could not take them within ``retry_for_s`` seconds."""
        oldest = list(self._queue.items())[:REQUEST_NOTES]
        path = oldest[0][1][0]
        sending = {number: frames for number, (at, frames) in oldest if at == path}
        call = Call("POST", path, b"".join(sending.values()), {"Content-Type": SAMPLES_TYPE}, TIMEOUT_S)
        try:
            reply = yield from answered(call, retry_for_s)
        except ForebayError as error:
            logger.warning("%d annotations could not be sent: %s", len(self), error)
            return False
        for number in sending:  # not earlier: a call that is cut off is made again
            self._queue.pop(number, None)
        try:
            refused = [each["error"]["message"] for each in decoded(reply, call)["results"] if "error" in each]
        except ForebayError as error:
            refused = [str(error)]
        if refused:
            logger.warning("%d annotations were refused; the first: %s", len(refused), refused[0])
        return True


def encode_note(uid: str, values: "Mapping[str, float | ArrayLike]", step: int, producer: str) -> bytes:
    """The frames of a note and of the part with its arrays. Raises ``InvalidInput``, ``MissingExtra``."""
    numbers: dict[str, float] = {}
    arrays: dict[str, Rows] = {}
    for name, value in values.items():
        data: Any = plain_tensor(value) if hasattr(value, "detach") else value
        data = data if isinstance(data, int | float) else numpy_module().asarray(data)
        if not getattr(data, "ndim", 0):
            numbers[name] = float(data)
        else:
            arrays[name] = Rows(data.astype("float32") if data.dtype == "float64" else data, [(0, len(data))])
    note, parts = take_parts({"uid": uid, "step": step, "producer": producer, "values": numbers, "arrays": arrays})
    return join_samples([*(part.frame for part in parts.values()), msgspec.json.encode(note)])
