"""Reading a binary sample: as any other, but for its arrays."""

from forebay.core.errors import InvalidInput
from forebay.core.sample import Incoming, read_sample
from forebay.core.token_arrays import check_arrays, is_binary, unpack


def read_any_sample(body: bytes) -> Incoming:
    """Check a body, binary or JSON, and return its indexed fields. Raises ``InvalidInput`` that names the field."""
    return _read_binary(body) if is_binary(body) else read_sample(body, is_lenient=False)


def _read_binary(body: bytes) -> Incoming:
    pieces = unpack(body)
    if not bytes(pieces.json[:1]) == b"{":
        raise InvalidInput("behind the arrays of a binary sample comes a JSON object", field="body")
    sample = read_sample(bytes(pieces.json), is_lenient=False)
    check_arrays(pieces)
    shift = len(body) - len(pieces.json)
    span = sample.reward_span
    sample.body, sample.reward_span = body, span and (span[0] + shift, span[1] + shift)
    return sample
