"""Where a run process asks for the gateway. The key in the path opens this one run."""

from typing import Annotated

from fastapi import APIRouter, Depends

from forebay.server.services import Services, services_of

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/w/{run_key}", tags=["run process"])


@router.post("/gateway")
async def gateway(run_key: str, services: Server) -> dict[str, str]:
    """Have the gateway running and this run known to it: its address, and the key that opens rollouts of this run."""
    return await services.gateway.admit(services.buffer.by_key(run_key).run)
