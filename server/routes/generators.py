"""Generators: what was discovered, and what is wrong with the rest."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from forebay.server.services import Services, services_of

router = APIRouter(prefix="/v1", tags=["generators"])


@router.get("/generators")
async def list_generators(services: Annotated[Services, Depends(services_of)]) -> dict[str, Any]:
    """Look again, and list every file with its task type, hooks and status; failed ones with their traceback."""
    return {"generators": [info.as_json() for info in await services.catalog.scan()]}
