"""Side arrays, images and parts of a sample on their way to the buffer: bytes by digest, and their places."""

import base64
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forebay.core.errors import InvalidInput
from forebay.core.parts import IMAGE_URL, LENGTHS, ArrayRows, NamedPart, Rows, numpy_module, pack_arrays
from forebay.core.safetensors_format import NUMPY_TYPES, Tensor

if TYPE_CHECKING:
    from forebay.client.sample_writer.outbox import Sample

_DTYPES = {name: dtype for dtype, name in reversed(NUMPY_TYPES.items())}

MIN_CHARACTERS = 4_096
"""Shorter data URLs of images stay in the messages."""


def take_parts(sample: "Sample") -> "tuple[Sample, Mapping[str, NamedPart]]":
    """The sample with the digests and places of its parts, arrays and images instead of bytes; the parts by digest.

    ``arrays`` has a ``Rows`` for each name, or the ``ArrayRows`` in ``parts``, which has ``NamedPart`` or ``bytes``. An
    array without rows is left out. A sample with other values in these two fields stays as it is.
    Raises ``InvalidInput`` for rows that are not as many as their tokens, ``MissingExtra`` without NumPy.
    """
    given, arrays, images = sample.get("parts"), sample.get("arrays"), list[NamedPart]()
    if not isinstance(given, list | tuple | None) or not isinstance(arrays, Mapping | None):
        return sample, {}
    messages = sample.get("messages")
    if isinstance(messages, list):
        messages = [_without_images(message, images) for message in messages]
    if given is None and arrays is None and not images:
        return sample, {}
    parts = [NamedPart.of(each) if isinstance(each, bytes) else each for each in given or ()]
    tensors: dict[str, Tensor] = {}
    places: dict[str, Any] = {}
    for name, rows in (arrays or {}).items():
        if not isinstance(rows, Rows):
            places[name] = rows
        elif len(rows.tokens):
            places[name] = _placed(name, rows, len(parts), tensors)
    if tensors:
        parts.append(pack_arrays(tensors))
    parts += dict.fromkeys(images)
    digests = [each.digest if isinstance(each, NamedPart) else each for each in parts]
    named = {each.digest: each for each in parts if isinstance(each, NamedPart)}
    changed = {"messages": messages} if images else {}
    return {**sample, **changed, "parts": digests, "arrays": places}, named


def _placed(name: str, rows: Rows, part: int, tensors: dict[str, Tensor]) -> ArrayRows:
    """Where the rows are in the part with this number, whose tensors are added to ``tensors``."""
    data, lengths = _tensor(rows.data), None if rows.lengths is None else _tensor(numpy_module().int32(rows.lengths))
    num_tokens = sum(end - start for start, end in rows.tokens)
    if num_tokens != (lengths or data).shape[0]:
        what = f"arrays.{name}: has {(lengths or data).shape[0]} rows for {num_tokens} tokens"
        raise InvalidInput(what, field=f"arrays.{name}", hint="tokens lists the tokens that have rows, in their order")
    tensors[name] = data
    if lengths is not None:
        tensors[name + LENGTHS] = lengths
    places, first = [], 0
    for start, end in rows.tokens:
        places.append((part, first, start, end))
        first += end - start
    return ArrayRows(data.dtype, (None,) if lengths else data.shape[1:], places)


def _tensor(array: Any) -> Tensor:
    made = numpy_module().ascontiguousarray(array)
    dtype = _DTYPES.get(made.dtype.newbyteorder("<").str)
    if dtype is None or not made.ndim:
        raise InvalidInput(f"an array must have numbers and at least one dimension (got {made.dtype} {made.shape})")
    # Bytes, not items: what is made of them counts bytes.
    return Tensor(dtype, made.shape, made.astype(NUMPY_TYPES[dtype], copy=False).reshape(-1).view("u1").data)


def _without_images(message: Any, parts: list[NamedPart]) -> Any:
    content = content_of(message)
    taken = [_part_of(part, parts) for part in content]
    return message if taken == content else {**message, "content": taken}


def _part_of(part: Any, parts: list[NamedPart]) -> Any:
    shown = shown_image(part)
    data, media_type = read_data_url(shown["url"]) if len(shown.get("url", "")) > MIN_CHARACTERS else (b"", "")
    if not data:
        return part
    parts.append(NamedPart.of(data))
    return {**part, "image_url": {**shown, "url": IMAGE_URL + parts[-1].digest, "media_type": media_type}}


def content_of(message: Any) -> list[Any]:
    """The parts of a message; none if it is plain text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list) else []


def shown_image(part: Any) -> Mapping[str, Any]:
    """The ``image_url`` of a part of a message, which has a ``url``; empty if the part is no image."""
    shown = part.get("image_url") if isinstance(part, Mapping) else None
    return shown if isinstance(shown, Mapping) and isinstance(shown.get("url"), str) else {}


def read_data_url(url: str) -> tuple[bytes, str]:
    """The bytes and the media type in a data URL; both empty for another URL, and unless it is base64."""
    head, _, encoded = url.partition(",")
    media_type, *flags = head.removeprefix("data:").split(";")
    try:
        is_data = head.startswith("data:") and "base64" in flags
        return (base64.b64decode(encoded, validate=True), media_type) if is_data else (b"", "")
    except ValueError:  # also for characters beyond ASCII
        return b"", ""
