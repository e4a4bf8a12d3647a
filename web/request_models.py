"""Request bodies as pydantic models, and the numbers in them, which may arrive as strings."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from forebay.core.errors import InvalidInput

Model = TypeVar("Model", bound=BaseModel)


def _no_flag(value: object) -> object:
    """Refuse ``true`` and ``false``, which would count as 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number", "Input should be a number, not true or false")
    return value


NotFlag = BeforeValidator(_no_flag)
# Up to what every reader of JSON holds exactly: many read numbers as float64.
Count = Annotated[int, NotFlag, Field(ge=1, le=1 << 53)]
Step = Annotated[int, NotFlag, Field(ge=0, le=1 << 53)]
WaitSeconds = Annotated[float, NotFlag, Field(ge=0)]
LeaseSeconds = Annotated[float, NotFlag, Field(gt=0, le=10_000_000)]


def parse(model: type[Model], body: bytes) -> Model:
    """Read a JSON object into ``model``. Raises ``InvalidInput`` with the first wrong field."""
    try:
        return model.model_validate(parse_object(body))
    except ValidationError as error:
        raise invalid(error) from None


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object. Raises ``InvalidInput``."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:  # nested too deeply for Python's reader
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None
    if not isinstance(value, dict):
        raise InvalidInput("the body must be a JSON object", field="body")
    return value


def invalid(error: ValidationError) -> InvalidInput:
    """The first complaint of a pydantic error, as ours."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"]) or "body"
    # Cut short: a complaint may quote what was sent.
    return InvalidInput(f"{name}: {first['msg']}"[:500], field=name)
