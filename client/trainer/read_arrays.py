"""Reads the parts of samples, side arrays and images, as flows."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from forebay.client.calls.flow import CALL_TIMEOUT_S, Flow, answered, failure, json_call
from forebay.client.model import BatchLike, Row
from forebay.client.sample_writer.encode_parts import content_of, read_data_url, shown_image
from forebay.client.trainer.run_requests import RunRequests
from forebay.core.errors import InvalidInput
from forebay.core.parts import IMAGE_URL, NO_ARRAYS, PART_LENGTH, ArrayRows, Rows, SideArrays, gather_rows
from forebay.core.safetensors_format import read_blob


class Image(NamedTuple):
    """An image that a message shows."""

    data: bytes
    """The file as the agent sent it; empty if only its URL is known."""
    media_type: str
    """For example ``image/png``; empty if unknown."""
    url: str = ""
    """The URL of an image without ``data``: an address on the web, which is not fetched, a data URL that is not base64,
    or a part that the row does not have, for example in a replay."""


class SampleRequests(RunRequests):
    """Requests for the parts of samples."""

    def arrays(
        self,
        batch: BatchLike,
        rows: Sequence[Row],
        names: Collection[str] | None = None,
        *,
        needs: Collection[str] = (),
    ) -> Flow[list[dict[str, Rows]]]:
        """Read the side arrays of these rows of a batch, in order: those of ``names``, or all.

        A training rank attaches to the run, and passes its own rows and the batch's id. An array that a row lacks is
        left out, unless it is in ``needs``. Works also after the ack, while the samples' bodies are kept.

        Raises ``InvalidInput`` that names the samples without a needed array, ``PartsGone``, ``LeaseLost``, and
        ``MissingExtra`` without NumPy.
        """
        sides = [side_arrays(row) for row in rows]
        for name in needs:
            lacking = [str(row.get("uid")) for row, side in zip(rows, sides, strict=True) if name not in side.arrays]
            if lacking:
                raise InvalidInput(f"{len(lacking)} samples lack the array {name}: {', '.join(lacking)}", field="needs")
        wanted = [side.arrays.keys() if names is None else side.arrays.keys() & {*names, *needs} for side in sides]
        asked = set[str]()
        for side, named in zip(sides, wanted, strict=True):
            asked |= {side.digests[number] for name in named for number, *_ in side.arrays[name].rows}
        found = yield from self._read_parts(batch, asked)
        parts = {digest: read_blob(part) for digest, part in found.items()}
        return [gather_rows(side, parts, named) for side, named in zip(sides, wanted, strict=True)]

    def images(self, batch: BatchLike, rows: Sequence[Row]) -> Flow[list[list[Image]]]:
        """Read the images that these rows of a batch show, in the order of their messages. Raises ``PartsGone``.

        The tokens of a sample have the engine's placeholders for them: a trainer's processor makes the same ones, with
        the sample's ``mm_processor_kwargs`` if it has any.
        """
        shown = [list(shown_images(row.get("messages"))) for row in rows]
        stored = [{IMAGE_URL + digest: digest for digest in side_arrays(row).digests} for row in rows]
        digests = {of[url] for each, of in zip(shown, stored, strict=True) for url, _ in each if url in of}
        parts = yield from self._read_parts(batch, digests)
        return [[_image(*each, parts) for each in of_row] for of_row in shown]

    def _read_parts(self, batch: BatchLike, digests: Collection[str]) -> Flow[dict[str, memoryview]]:
        if not digests:
            return {}
        body = {"parts": list(digests)}
        call = json_call("POST", f"{self._batch_path(batch)}/parts", body, 2 * CALL_TIMEOUT_S)
        reply = yield from answered(call, self._retry_for_s)
        if not reply.is_success:
            raise failure(reply, call)
        return dict(zip(digests, _split_parts(reply.body), strict=True))


def _image(url: str, media_type: str, parts: Mapping[str, memoryview]) -> Image:
    part = parts.get(url.removeprefix(IMAGE_URL)) if url.startswith(IMAGE_URL) else None
    if part is not None:
        return Image(bytes(part), media_type)
    data, media_type = read_data_url(url)
    return Image(data, media_type) if data else Image(b"", "", url)


def shown_images(messages: Any) -> Iterator[tuple[str, str]]:
    """The address and the media type of each image in the messages."""
    for message in messages if isinstance(messages, list) else ():
        for image in filter(None, map(shown_image, content_of(message))):
            yield image["url"], str(image.get("media_type") or "")


def side_arrays(row: Mapping[str, Any]) -> SideArrays:
    """The parts and arrays of a row that was read; none if its writer uses these names otherwise."""
    try:
        digests = msgspec.convert(row.get("parts") or [], list[str])
        return SideArrays(digests, msgspec.convert(row.get("arrays") or {}, dict[str, ArrayRows]))
    except msgspec.ValidationError:
        return NO_ARRAYS


def _split_parts(body: bytes) -> list[memoryview]:
    """Split a reply with parts (``PARTS_TYPE``)."""
    view, at, parts = memoryview(body), 0, list[memoryview]()
    while at < len(view):
        start = at + PART_LENGTH.size
        at = start + PART_LENGTH.unpack_from(view, at)[0]
        parts.append(view[start:at])
    return parts
