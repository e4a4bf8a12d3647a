"""Batches after they were read: acknowledge, release and extend leases; set checkpoints, and rewind to one."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict

from forebay.buffer.leases.checkpoints import checkpoint, rewind
from forebay.buffer.leases.leases import Leases
from forebay.core.group import BatchState
from forebay.server.services import Services, services_of
from forebay.server.views import batch_view, checkpoint_views
from forebay.web.request_models import LeaseSeconds, Step, parse

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1/runs/{run_id}", tags=["batches"])


class ExtendRequest(BaseModel):
    """The body of ``…/batches/{batch_id}/extend``."""

    model_config = ConfigDict(extra="forbid")

    lease_s: LeaseSeconds | None = None


class CheckpointRequest(BaseModel):
    """The body of ``…/checkpoints``."""

    model_config = ConfigDict(extra="forbid")

    step: Step
    batch_ids: list[str] | None = None


class RewindRequest(BaseModel):
    """The body of ``…/rewind``. ``step`` is required: null undoes everything."""

    model_config = ConfigDict(extra="forbid")

    step: Step | None


def leases_of(run_id: str, services: Server) -> Leases:
    """The leases of the run in the path. Raises ``RunNotFound``."""
    return services.buffer.get(run_id).delivery.leases


RunLeases = Annotated[Leases, Depends(leases_of)]


@router.get("/batches")
async def list_batches(leases: RunLeases, state: BatchState | None = None) -> dict[str, Any]:
    """List every batch that was delivered, oldest first."""
    rows = await leases.buffer.gone.all_batches(*([state] if state else []))
    return {"batches": [batch_view(row) for row in rows]}


@router.post("/batches/{batch_id}/ack")
async def ack(batch_id: str, leases: RunLeases) -> dict[str, Any]:
    """Acknowledge a batch: its groups are never delivered again, unless a rewind restores them."""
    row = await leases.ack(batch_id)
    return {"batch_id": row.batch_id, "state": BatchState.ACKED.value}


@router.post("/batches/{batch_id}/release")
async def release(batch_id: str, leases: RunLeases) -> dict[str, Any]:
    """Release a batch: its groups are ready again, in their old order."""
    row = await leases.release(batch_id)
    return {"batch_id": row.batch_id, "state": BatchState.RELEASED.value}


@router.post("/batches/{batch_id}/extend")
async def extend(batch_id: str, request: Request, leases: RunLeases) -> dict[str, Any]:
    """Extend a lease: its time starts again."""
    asked = parse(ExtendRequest, await request.body() or b"{}")
    row = await leases.extend(batch_id, asked.lease_s)
    return {"batch_id": row.batch_id, "state": BatchState.LEASED.value, "lease_s": row.lease_s}


@router.get("/checkpoints")
async def list_checkpoints(leases: RunLeases) -> dict[str, Any]:
    """List every checkpoint that a rewind can restore, by step."""
    acked = await leases.buffer.gone.all_batches(BatchState.ACKED)
    return {"checkpoints": checkpoint_views(leases.buffer.batches.checkpoints, acked)}


@router.post("/checkpoints")
async def set_checkpoint(request: Request, leases: RunLeases, services: Server) -> dict[str, Any]:
    """Assign batches to the trainer's checkpoint of a step and acknowledge them, all or none."""
    asked = parse(CheckpointRequest, await request.body())
    fixed = await checkpoint(leases, asked.step, asked.batch_ids)
    if asked.step == max(leases.buffer.batches.steps):
        services.evaluations.note_marked(leases.buffer.run.run_id, asked.step)
    services.retention.ask()  # bodies that no checkpoint needs may be removed now
    ids = [row.batch_id for row in fixed]
    return {"step": asked.step, "batch_ids": ids, "checkpoints": leases.buffer.batches.steps}


@router.post("/rewind")
async def go_back(request: Request, leases: RunLeases, services: Server) -> dict[str, Any]:
    """Rewind to the trainer's checkpoint of a step: all groups outside it are ready again; null for all groups."""
    # A missing body does not mean everything: null must be written.
    asked = parse(RewindRequest, await request.body())
    undone = await rewind(leases, asked.step)
    await services.evaluations.note_rewound(leases.buffer.run.run_id, asked.step)
    num_groups = sum(len(row.group_ids) for row in undone.batches)
    steps = leases.buffer.batches.steps
    return {"step": asked.step, "num_batches": len(undone.batches), "num_groups": num_groups, "checkpoints": steps}
