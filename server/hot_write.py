"""Taking samples in."""

import time

import msgspec

from forebay.buffer.buffer import Entry
from forebay.buffer.run_buffer import WriteResult
from forebay.core.errors import BufferFull, InvalidInput
from forebay.core.sample import read_sample
from forebay.server.asgi import encode, error_body, error_headers, send_json
from forebay.server.hot_route import Call, HotRoute, SlimeRoute

_Refusal = InvalidInput | BufferFull
_Verdict = WriteResult | _Refusal
_split_array = msgspec.json.Decoder(list[msgspec.Raw]).decode

_STORED = b'{"success":true,"message":"the sample is stored","duplicate":false,"data":{"data":['
_KNOWN = b'{"success":true,"message":"the sample was stored before","duplicate":true,"data":{"data":['
_END = b'],"meta_info":"write to buffer"}}'


class SlimeWrite(SlimeRoute):
    """``/buffer/write``: one sample, which comes back in the reply; one without a usable reward counts as failed."""

    async def answer(self, call: Call) -> None:
        began_s = time.perf_counter()
        sample = read_sample(call.body, is_lenient=True)
        result = await call.entry.buffer.write_when_room(sample, call.services.settings.write_wait_s)
        await result.stored
        call.services.metrics.write_seconds.observe(time.perf_counter() - began_s)
        head = _KNOWN if result.is_duplicate else _STORED
        await send_json(call.send, 200, b"".join((head, call.body, _END)))


class NativeWrite(HotRoute):
    """``/v1/runs/{run_id}/samples``: one sample or an array, and a verdict for each."""

    async def answer(self, call: Call) -> None:
        began_s = time.perf_counter()
        is_array = call.body.lstrip()[:1] == b"["
        verdicts = [_accept(call.entry, item) for item in (_items(call.body) if is_array else [call.body])]
        results = [await _stored(verdict) for verdict in verdicts]
        call.services.metrics.write_seconds.observe(time.perf_counter() - began_s)
        if not is_array and isinstance(verdicts[0], _Refusal):
            raise verdicts[0]
        full = next((verdict for verdict in verdicts if isinstance(verdict, BufferFull)), None)
        await send_json(call.send, 200, encode({"results": results}), error_headers(full) if full else ())


def _items(body: bytes) -> list[bytes]:
    try:
        return [bytes(item) for item in _split_array(body)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not a JSON array: {error}", field="body") from None


def _accept(entry: Entry, item: bytes) -> _Verdict:
    try:
        return entry.buffer.write(read_sample(item, is_lenient=False))
    except (InvalidInput, BufferFull) as error:  # those behind it may belong to open groups, which take them
        return error


async def _stored(verdict: _Verdict) -> dict[str, object]:
    if isinstance(verdict, _Refusal):
        return {"status": verdict.status, **error_body(verdict)}
    await verdict.stored
    outcome = "failed" if verdict.is_failed and verdict.outcome == "member" else verdict.outcome
    return {"status": 200, "uid": verdict.uid, "duplicate": verdict.is_duplicate, "outcome": outcome}
