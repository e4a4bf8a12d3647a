"""The search through what models and tools wrote in a run, for the page."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query

from forebay.core.errors import InvalidInput
from forebay.server.search.text_index import MIN_LENGTH
from forebay.server.services import Services, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["groups"])


@router.get("/search")
async def search(
    run_id: str,
    services: Server,
    text: Annotated[str, Query(max_length=1_000)] = "",
    instance: str = "",
    min_reward: Annotated[float | None, Query(allow_inf_nan=False)] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> dict[str, Any]:
    """The newest samples whose tool messages or last answer contain ``text``; their number, and their mean reward.

    ``instance`` and ``min_reward`` narrow what is searched. Without ``text``: how far the index goes.
    """
    if text and len(text) < MIN_LENGTH:
        raise InvalidInput(f"a text to search for has at least {MIN_LENGTH} characters", field="text")
    services.buffer.get(run_id)
    return await services.searches.of(services.buffer, run_id).find(text, instance, min_reward, limit)
