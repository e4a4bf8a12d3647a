"""Request bodies as pydantic models; numbers in them may arrive as strings."""

import json
import re
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from forebay.core.errors import InvalidInput
from forebay.core.starts.payload_text import check_texts

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Model = TypeVar("Model", bound=BaseModel)


def _no_flag(value: object) -> object:
    """Refuse ``true`` and ``false``, which would count as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return value


NotFlag = BeforeValidator(_no_flag)
# The largest integer that every JSON reader keeps exact: many read numbers as float64.
Count = Annotated[int, NotFlag, Field(ge=1, le=1 << 53)]
Step = Annotated[int, NotFlag, Field(ge=0, le=1 << 53)]
WaitSeconds = Annotated[float, NotFlag, Field(ge=0)]
LeaseSeconds = Annotated[float, NotFlag, Field(gt=0, le=10_000_000)]


def parse(model: type[Model], body: bytes) -> Model:
    """Read a JSON object into ``model``. Raises ``InvalidInput`` that names the first wrong field."""
    try:
        return model.model_validate(parse_request(body))
    except ValidationError as error:
        raise invalid(error) from None


def parse_request(body: bytes) -> dict[str, Any]:
    """Read a JSON object whose strings can be stored and used as names. Raises ``InvalidInput`` naming the field."""
    value = _read_object(body)
    check_texts(value)
    return value


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object whose strings can be encoded as UTF-8. Raises ``InvalidInput``."""
    value = _read_object(body)
    if _SURROGATE.search(body):
        _check_surrogates(value)
    return value


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        # Not as bytes: Python's reader would accept lone surrogates.
        value = json.loads(body.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # nested too deeply for Python's reader
        raise InvalidInput(f"the body is not JSON: {error}"[:500], field="body") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object", field="body")
    return value


def _check_surrogates(value: dict[str, Any]) -> None:
    """Refuse lone surrogates, which files, indexes, tokenizers and replies cannot contain."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "the body holds half of a surrogate pair (\\ud800 to \\udfff), which is not valid text"
        raise InvalidInput(message, field="body") from None


def invalid(error: ValidationError) -> InvalidInput:
    """The first complaint of a pydantic error, as ``InvalidInput``."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "body"
    # Cut short: a complaint may quote what was sent.
    return InvalidInput(f"{name}: {first['msg']}"[:500], field=name)
