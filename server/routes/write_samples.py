"""Routes that store samples."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from forebay.buffer.admission import Receipt, write, write_when_room
from forebay.buffer.buffer import Buffer
from forebay.buffer.run_buffer import RunBuffer
from forebay.core.binary_sample import is_samples, split_samples
from forebay.core.errors import BodyTooLarge, BufferFull, ForebayError, InvalidInput
from forebay.core.parts import CheckedPart, SideArrays, check_arrays, digest_of, is_part_frame, read_part_frame
from forebay.core.sample import PLACE_HEADER, WRITER_HEADER, Incoming, read_any_sample, read_sample
from forebay.server.routes.sample_routes import (
    SampleCall,
    SamplePaths,
    SampleRoute,
    SlimeRoute,
    by_name_to_write,
)
from forebay.web.decompression import plain_body
from forebay.web.replies import encode, error_body, error_headers, send_json

NDJSON_TYPES = frozenset({b"application/x-ndjson", b"application/ndjson", b"application/jsonl"})

_WRITER, _PLACE = WRITER_HEADER.lower().encode(), PLACE_HEADER.lower().encode()

Answer = Receipt | ForebayError
"""The outcome of an item: stored, or refused."""
_split_array = msgspec.json.Decoder(list[msgspec.Raw]).decode

_STORED = b'{"success":true,"message":"the sample is stored","duplicate":false,"data":{"data":['
_KNOWN = b'{"success":true,"message":"the sample was stored before","duplicate":true,"data":{"data":['
_END = b'],"meta_info":"write to buffer"}}'


class SlimeWrite(SlimeRoute):
    """``/buffer/write``: one sample, returned in the reply; one without a usable reward counts as failed.

    Any client may write here, under names of its own. Fields with Forebay's names count only from writers that declare
    that they know them.
    """

    async def answer(self, call: SampleCall) -> None:
        began_s = time.perf_counter()
        sample = read_sample(call.body.data, is_lenient=True, is_foreign=not call.header(_WRITER))
        receipt = await write_when_room(call.entry.buffer, sample, call.services.settings.write_wait_s)
        await receipt.stored
        call.services.metrics.write_seconds.observe(time.perf_counter() - began_s)
        head = _KNOWN if receipt.is_duplicate else _STORED
        headers = _place_headers(receipt) if call.header(_PLACE) else ()
        await send_json(call.send, 200, b"".join((head, sample.body, _END)), headers)


def _place_headers(receipt: Receipt) -> list[tuple[bytes, bytes]]:
    row = receipt.row
    return [] if row is None else [(_PLACE, f"{row.group_id} {row.epoch} {row.slot}".encode())]


class NativeWrite(SampleRoute):
    """``/v1/runs/{run_id}/samples``: one sample, an array, or one per line, with a result for each.

    Frames of binary samples may be parts, which belong to the samples that name them.
    """

    async def answer(self, call: SampleCall) -> None:
        began_s = time.perf_counter()
        request = await WriteRequest.read(call)
        answers = await _accept_all(call.entry.buffer, request)
        # All are accepted before any is waited for, so that the journal writes them with one sync.
        await send_results(call, request, answers)
        call.services.metrics.write_seconds.observe(time.perf_counter() - began_s)


class WriteRequest(NamedTuple):
    """What a request writes."""

    items: Sequence[bytes]
    parts: Mapping[str, CheckedPart]
    """Those whose bytes are as named, by digest."""
    max_array_bytes: int
    """The limit for the parts of one sample."""
    lines: Iterable[int]
    """The number of each item's line, if lines were sent."""
    is_list: bool

    @classmethod
    async def read(cls, call: SampleCall) -> "WriteRequest":
        """Split the body of a request. Raises ``InvalidInput``."""
        coding, kind = call.header(b"content-encoding"), call.header(b"content-type")
        body = await plain_body(coding, call.body, call.services.bodies.max_body_bytes)
        is_ndjson = kind.partition(b";")[0].strip().lower() in NDJSON_TYPES
        is_binary, lines = is_samples(kind), _split_lines(body) if is_ndjson else None
        is_list = is_binary or lines is not None or body.lstrip()[:1] == b"["
        frames = split_samples(memoryview(body)) if is_binary else []
        framed = [read_part_frame(frame) for frame in frames if is_part_frame(frame)]
        parts = await asyncio.to_thread(_genuine, framed) if framed else {}
        if is_binary:
            items = [bytes(frame) for frame in frames if not is_part_frame(frame)]
        else:
            items = list(lines.values()) if lines is not None else _items(body) if is_list else [body]
        _check_number(len(items), call.services.settings.max_batch_samples)
        return cls(items, parts, call.entry.run.settings.max_array_bytes, lines or (), is_list)

    def parts_of(self, side: SideArrays, num_tokens: int) -> dict[str, memoryview]:
        """The parts of a sample of ``num_tokens`` tokens, by digest.

        Raises ``InvalidInput``, and ``BodyTooLarge`` if they are too large.
        """
        missing = next((digest for digest in side.digests if digest not in self.parts), None)
        if missing is not None:
            raise InvalidInput(
                f"parts: part {missing} must be in this request, with the bytes of this digest",
                field="parts",
                hint="send a frame of it before the sample, in the same request",
            )
        parts = {digest: self.parts[digest].data for digest in side.digests}
        if sum(map(len, parts.values())) > self.max_array_bytes:
            raise BodyTooLarge(self.max_array_bytes, "max_array_bytes", "the parts of a sample are")
        check_arrays(side, [self.parts[digest] for digest in side.digests], num_tokens)
        return parts


def _genuine(framed: Sequence[tuple[str, memoryview]]) -> dict[str, CheckedPart]:
    return {digest: CheckedPart.of(data) for digest, data in framed if digest_of(data) == digest}


async def send_results(call: SampleCall, request: WriteRequest, answers: Sequence[Answer]) -> None:
    """Send the result of each item, once all are stored. A single item's refusal is raised instead."""
    results = [await _result(answer) for answer in answers]
    _number_lines(results, request.lines)
    # A single item is refused with the reply's status; in a list, each has a status of its own.
    if not request.is_list and not isinstance(answers[0], Receipt):
        raise answers[0]
    full = next((answer for answer in answers if isinstance(answer, BufferFull)), None)
    await send_json(call.send, 200, encode({"results": results}), error_headers(full) if full else ())


def _check_number(num_samples: int, limit: int) -> None:
    if num_samples > limit:
        hint = f"send at most {limit} per request, or raise the server's setting max_batch_samples"
        raise InvalidInput(f"{num_samples} samples in one write: none was stored", hint=hint, field="body")


def _split_lines(body: bytes) -> dict[int, bytes]:
    """Non-empty lines of an NDJSON body, by line number from 1."""
    return {number: line for number, line in enumerate(body.split(b"\n"), start=1) if line.strip()}


def _number_lines(results: Iterable[dict[str, Any]], numbers: Iterable[int]) -> None:
    """Add the line number of its sample to every refusal."""
    for result, number in zip(results, numbers, strict=False):  # numbers are empty unless lines were sent
        if error := result.get("error"):
            result["line"] = number
            error["message"] = f"line {number}: {error['message']}"


def _items(body: bytes) -> list[bytes]:
    try:
        return [bytes(item) for item in _split_array(body)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not a JSON array: {error}", field="body") from None


async def _accept_all(buffer: RunBuffer, request: WriteRequest) -> list[Answer]:
    """Accept samples one after the other, without waiting in between."""
    samples = [_read(item, request) for item in request.items]
    places = [(each.instance_id, each.epoch) for each in samples if isinstance(each, Incoming)]
    if not all(buffer.gone.knows(*place) for place in places):
        await buffer.gone.look_up(places)
    return [_accept(buffer, sample) for sample in samples]


def _read(item: bytes, request: WriteRequest) -> Incoming | ForebayError:
    try:
        sample = read_any_sample(item)
        sample.parts = request.parts_of(sample.side, sample.num_tokens)
        return sample
    except (InvalidInput, BodyTooLarge) as error:  # the others are still accepted
        return error


def _accept(buffer: RunBuffer, sample: Incoming | ForebayError) -> Answer:
    try:
        return write(buffer, sample) if isinstance(sample, Incoming) else sample
    except (InvalidInput, BufferFull) as error:  # later ones may belong to open groups, which accept them
        return error


async def _result(answer: Answer) -> dict[str, object]:
    if isinstance(answer, ForebayError):
        return {"status": answer.status, **error_body(answer)}
    await answer.stored
    result: dict[str, object] = {"status": 200, "uid": answer.uid, "duplicate": answer.is_duplicate}
    if answer.is_duplicate:  # only the store has the result of the first one
        return result
    return result | {"outcome": "failed" if answer.is_failed and answer.outcome == "member" else answer.outcome}


_SLIME_WRITE, _NATIVE_WRITE = SlimeWrite(), NativeWrite()
PATHS: SamplePaths = {
    ("", "buffer/write"): (_SLIME_WRITE, by_name_to_write),
    ("s", "buffer/write"): (_SLIME_WRITE, by_name_to_write),
    ("w", "buffer/write"): (_SLIME_WRITE, Buffer.by_key),
    ("w", "samples"): (_NATIVE_WRITE, Buffer.by_key),
    ("v1/runs", "samples"): (_NATIVE_WRITE, Buffer.get),
}
