"""Handing batches out."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Iterable

from starlette.types import Receive

from forebay.buffer.choosing import ReadRequest
from forebay.buffer.delivery import Batch
from forebay.core.errors import StorageFailed
from forebay.core.sample import Parts
from forebay.server.asgi import ClientGone, encode, send_json, send_parts
from forebay.server.hot_route import Call, HotRoute, SlimeRoute
from forebay.server.requests import parse_batch_request, parse_slime_read


class Reading(HotRoute):
    """Leases a batch, sends it, and acks it once the last byte went out to a client that was still there."""

    async def deliver(self, call: Call, request: ReadRequest, wait_s: float) -> bool:
        """Whether the request could be satisfied."""
        wait_s = min(wait_s, call.services.settings.max_wait_s)
        client = asyncio.create_task(_disconnected(call.receive))
        try:
            batch = await _unless_gone(client, call.entry.delivery.read(request, wait_s))
            if batch is None:
                return False
            await self._send(call, batch, client)
            return True
        finally:
            client.cancel()

    async def _send(self, call: Call, batch: Batch, client: "asyncio.Task[None]") -> None:
        began_s = time.perf_counter()
        delivery = call.entry.delivery
        try:
            if await send_parts(call.send, self.parts(batch), client.done):
                delivery.ack(batch.batch_id)
        finally:  # not acked: the client went away, so its groups are for the next one
            delivery.release(batch.batch_id)
        call.services.metrics.read_seconds.observe(time.perf_counter() - began_s)

    @abstractmethod
    def parts(self, batch: Batch) -> list[bytes | memoryview]:
        """The reply with the batch in it."""


class SlimeRead(SlimeRoute, Reading):
    """``/get_rollout_data`` and ``/buffer/read``."""

    async def answer(self, call: Call) -> None:
        asked = parse_slime_read(call.body)
        told = "No data available to read" if asked.batch_size is None else "fewer rows are ready than batch_size"
        try:
            is_sent = await self.deliver(call, ReadRequest(batch_size=asked.batch_size, is_slime=True), asked.wait_s)
        except StorageFailed as error:  # slime's client gives up on anything but 200
            is_sent, told = False, error.message
        if not is_sent:
            data = {"data": [], "meta_info": call.entry.delivery.meta_info()}
            await send_json(call.send, 200, encode({"success": False, "message": told, "data": data}))

    def parts(self, batch: Batch) -> list[bytes | memoryview]:
        head = f'{{"success":true,"message":"{len(batch.rows)} rows of {len(batch.groups)} groups","data":{{"data":['
        return [head.encode(), *_joined(batch.rows), b'],"meta_info":', encode(batch.meta_info), b"}}"]


class NativeRead(Reading):
    """``/v1/runs/{run_id}/batches``."""

    async def answer(self, call: Call) -> None:
        asked = parse_batch_request(call.body)
        request = ReadRequest(num_groups=asked.num_groups, batch_size=asked.batch_size)
        if not await self.deliver(call, request, asked.wait_s):
            empty: dict[str, object] = {"batch_id": None, "data": [], "meta_info": call.entry.delivery.meta_info()}
            await send_json(call.send, 200, encode(empty))

    def parts(self, batch: Batch) -> list[bytes | memoryview]:
        head = b'{"batch_id":' + encode(batch.batch_id) + b',"data":['
        return [head, *_joined(batch.rows), b'],"meta_info":', encode(batch.meta_info), b"}"]


def _joined(rows: list[Parts]) -> Iterable[bytes | memoryview]:
    """The rows with commas between them, without copying them."""
    for number, row in enumerate(rows):
        if number:
            yield b","
        yield from row


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(client: "asyncio.Task[None]", work: Awaitable[Batch | None]) -> Batch | None:
    """Await ``work``, unless the client goes away first: then it is cancelled. Raises ``ClientGone``."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, client}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
