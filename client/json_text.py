"""Reading what the server tells, numbers beyond float64 included."""

import json
from typing import Any

import msgspec


def read_json(text: bytes | memoryview) -> Any:
    """The value in ``text``. A number too large for a float, which a sample may hold, becomes infinite.

    Raises ``ValueError`` for what is no JSON.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.ValidationError:  # its decoder refuses such a number, and with it everything around
        return json.loads(bytes(text))
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
