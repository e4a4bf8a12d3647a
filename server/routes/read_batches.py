"""Routes that lease batches and send them."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterable
from functools import partial
from itertools import chain
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from forebay.buffer.buffer import Buffer
from forebay.buffer.reads.delivery import Delivery, LeasedBatch
from forebay.buffer.reads.reply_rows import PROVED_BYTES, ReplyRows
from forebay.buffer.reads.selection import ReadRequest
from forebay.buffer.store.abc import num_sent
from forebay.core.errors import InvalidInput, StorageFailed
from forebay.core.records.reward_place import Parts
from forebay.server.direct_send import DirectBody, direct_reply, watched
from forebay.server.routes.sample_routes import SampleCall, SamplePaths, SampleRoute, SlimeRoute, by_name
from forebay.server.routes.tensor_replies import Pieces, json_rows, tensor_reply, wants_tensors
from forebay.server.tracing.read_records import TracedRead
from forebay.web.replies import JSON_HEADER, ClientGone, Header, HttpReply, encode, send_json, send_reply, until_gone
from forebay.web.request_models import Count, LeaseSeconds, Step, WaitSeconds, parse


class SlimeReadBody(BaseModel):
    """Body of ``/get_rollout_data`` and ``/buffer/read``.

    slime's client may ask for more rows than there are, without an error; an empty body asks for everything.
    """

    model_config = ConfigDict(extra="ignore")

    batch_size: Annotated[int, Field(ge=1)] | None = None
    timeout: float = Field(default=0.0, ge=0)
    wait: bool = False

    @property
    def wait_s(self) -> float:
        """Seconds to wait; 0 unless the client asks for more."""
        return self.timeout if self.wait else 0.0


class BatchRequest(BaseModel):
    """Body of ``/v1/runs/{run_id}/batches``."""

    model_config = ConfigDict(extra="forbid")

    num_groups: Count | None = None
    batch_size: Count | None = None
    wait_s: WaitSeconds = 0.0
    lease_s: LeaseSeconds = 600.0
    step: Step | None = None
    max_staleness: Step | None = None
    request_id: str | None = Field(default=None, min_length=1, max_length=200)

    @model_validator(mode="after")
    def _has_one_size(self) -> "BatchRequest":
        if (self.num_groups is None) == (self.batch_size is None):
            raise ValueError("give either num_groups or batch_size")
        return self


class BatchRoute(SampleRoute):
    """Leases a batch and sends it; releases it unless a connected client was sent the last byte."""

    async def deliver(self, call: SampleCall, request: ReadRequest, wait_s: float) -> bool:
        """Send a batch; return whether there was one."""
        if (evaluates := call.entry.run.evaluates) is not None:
            hint = f"read batches of run {evaluates.run_id!r}; its evaluations have the results"
            raise InvalidInput("an evaluation has no batches", hint=hint, field="run_id")
        wait_s = min(wait_s, call.services.settings.max_wait_s)
        # The body is complete: the next message can only be a disconnect.
        client = asyncio.create_task(until_gone(call.receive))
        read = call.services.traces.reads(call.entry.run.run_id).begin(request)
        try:
            batch = await _unless_gone(client, self.lease(call.entry.delivery, request, wait_s))
            if batch is None:
                read.in_vain()
                return False
            await self._send(call, batch, client, read)
            return True
        except BaseException as error:
            read.failed(error)
            raise
        finally:
            client.cancel()

    async def _send(self, call: SampleCall, batch: LeasedBatch, client: "asyncio.Task[None]", read: TracedRead) -> None:
        began_s = time.perf_counter()
        read.found(batch)
        delivery = call.entry.delivery
        has_begun = has_arrived = False
        try:
            reply = await self.reply(call, batch)
            has_begun = True
            read.begins(reply.num_bytes)
            with watched(call.scope, partial(delivery.leases.patience_s, batch.batch_id)):
                confirm = partial(read.stored, delivery, batch)
                has_arrived = await send_reply(call.send, reply, client.done, confirm)
        except StorageFailed as error:
            await delivery.broken(batch, error)
            if has_begun:  # the reply has started, so the error can only close the connection
                raise ClientGone from error
            raise
        finally:
            if has_arrived:
                delivery.leases.arrived(batch.batch_id)
            else:  # the client disconnected: its groups go to the next one
                delivery.leases.abandoned(batch.batch_id)
        read.ended(is_sent=has_arrived)
        call.services.metrics.read_seconds.observe(time.perf_counter() - began_s)

    async def reply(self, call: SampleCall, batch: LeasedBatch) -> HttpReply:
        """The reply that carries the batch."""
        rows, frame = batch.rows, self.frame(batch)
        # Rows finished by a hook, or with arrays to turn into lists, differ from what the store has.
        may_be_direct = DirectBody.of(call.scope) is not None and not rows.is_whole and not rows.may_be_binary
        pieces = rows.outbound() if may_be_direct else None
        if pieces is not None:
            # Errors in the first pieces get an error reply; a reply that has begun can only be broken off.
            await rows.prove(PROVED_BYTES)
            whole = [frame[0], *pieces, frame[1]]
            num_bytes = sum(map(num_sent, whole))
            return direct_reply(
                call.scope, JSON_HEADER, call.entry.buffer.store, whole, num_bytes, _framed(frame, rows)
            )
        await rows.load()
        await rows.measure()
        if rows.is_whole and rows.may_be_binary:
            return _whole([frame[0], *_joined(await json_rows(list(rows))), frame[1]], JSON_HEADER)
        # Each row is measured with a trailing comma; the last comma is dropped when it is sent.
        num_bytes = rows.num_bytes - min(1, len(rows)) + sum(map(len, frame))
        return HttpReply(JSON_HEADER, num_bytes, _framed(frame, rows))

    async def lease(self, delivery: Delivery, request: ReadRequest, wait_s: float) -> LeasedBatch | None:
        """Lease a batch. The lease may still be on its way to disk while all but the end of the reply is sent."""
        return await delivery.prepare(request, wait_s)

    @abstractmethod
    def frame(self, batch: LeasedBatch) -> tuple[bytes, bytes]:
        """The bytes before and after a batch's rows in its reply."""


class SlimeRead(SlimeRoute, BatchRoute):
    """Serves ``/get_rollout_data`` and ``/buffer/read``."""

    async def answer(self, call: SampleCall) -> None:
        asked = parse(SlimeReadBody, call.body.data or b"{}")
        message = "No data available to read" if asked.batch_size is None else "fewer rows are ready than batch_size"
        try:
            is_sent = await self.deliver(call, ReadRequest(batch_size=asked.batch_size, is_slime=True), asked.wait_s)
        except StorageFailed as error:  # slime's client stops on any status except 200
            is_sent, message = False, error.message
        if not is_sent:
            data = {"data": [], "meta_info": call.entry.delivery.meta_info()}
            await send_json(call.send, 200, encode({"success": False, "message": message, "data": data}))

    async def lease(self, delivery: Delivery, request: ReadRequest, wait_s: float) -> LeasedBatch | None:
        # Waits for the disk before the first byte: slime's client understands a failure, but not half a reply.
        return await delivery.read(request, wait_s)

    def frame(self, batch: LeasedBatch) -> tuple[bytes, bytes]:
        head = f'{{"success":true,"message":"{len(batch.rows)} rows of {len(batch.groups)} groups","data":{{"data":['
        return head.encode(), b'],"meta_info":' + encode(batch.meta_info) + b"}}"


class NativeRead(BatchRoute):
    """Serves ``/v1/runs/{run_id}/batches``."""

    async def answer(self, call: SampleCall) -> None:
        asked = parse(BatchRequest, call.body.data or b"{}")
        request = ReadRequest(
            num_groups=asked.num_groups,
            batch_size=asked.batch_size,
            lease_s=asked.lease_s,
            step=asked.step,
            max_staleness=asked.max_staleness,
            request_id=asked.request_id or "",
        )
        if not await self.deliver(call, request, asked.wait_s):
            empty: dict[str, object] = {"batch_id": None, "data": [], "meta_info": call.entry.delivery.meta_info()}
            await send_json(call.send, 200, encode(empty))

    async def reply(self, call: SampleCall, batch: LeasedBatch) -> HttpReply:
        if not wants_tensors(call.header(b"accept")):
            return await super().reply(call, batch)
        return await tensor_reply(call.scope, call.entry.buffer, batch.rows, _group_sizes(batch), self.frame(batch))

    def frame(self, batch: LeasedBatch) -> tuple[bytes, bytes]:
        row = batch.row
        sizes = _group_sizes(batch)
        head = {"batch_id": row.batch_id, "lease_s": row.lease_s, "num_groups": len(sizes), "group_sizes": sizes}
        head["group_ids"] = row.group_ids
        are_foreign = chain.from_iterable(staged.are_foreign for staged in batch.staged)
        if foreign_rows := [place for place, is_foreign in enumerate(are_foreign) if is_foreign]:
            head["foreign_rows"] = foreign_rows
        # The rows are bytes from the store: the enclosing object is encoded without them, then split.
        return encode(head)[:-1] + b',"data":[', b'],"meta_info":' + encode(batch.meta_info) + b"}"


def _group_sizes(batch: LeasedBatch) -> list[int]:
    """Number of rows per group."""
    return [len(staged.rows) for staged in batch.staged]


def _joined(rows: Iterable[Parts]) -> Pieces:
    """The rows joined by commas, without copying them."""
    pieces: Pieces = []
    for row in rows:
        pieces += row
        pieces.append(b",")
    return pieces[:-1]


def _whole(pieces: Pieces, kind: Header) -> HttpReply:
    async def at_once() -> AsyncIterator[Pieces]:
        yield pieces

    return HttpReply(kind, sum(map(len, pieces)), at_once())


async def _framed(frame: tuple[bytes, bytes], rows: ReplyRows) -> AsyncIterator[Pieces]:
    """The frame and the rows between its parts, joined by commas, some rows at a time."""
    yield [frame[0]]
    num_left = len(rows)
    async for chunk in rows.chunks():
        num_left -= len(chunk.pieces)
        yield [memoryview(chunk.data)[: None if num_left else -1]]
    yield [frame[1]]


async def _unless_gone(client: "asyncio.Task[None]", work: Awaitable[LeasedBatch | None]) -> LeasedBatch | None:
    """Await ``work``, or cancel it if the client disconnects first. Raises ``ClientGone``."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, client}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():  # even if the client left at the same moment: a lease that was taken must be released
            return task.result()
        raise ClientGone
    finally:
        task.cancel()


_SLIME_READ = SlimeRead()
PATHS: SamplePaths = {
    ("", "get_rollout_data"): (_SLIME_READ, by_name),
    ("", "buffer/read"): (_SLIME_READ, by_name),
    ("s", "get_rollout_data"): (_SLIME_READ, by_name),
    ("s", "buffer/read"): (_SLIME_READ, by_name),
    ("v1/runs", "batches"): (NativeRead(), Buffer.get),
}
