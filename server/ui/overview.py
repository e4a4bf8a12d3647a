"""The state of the whole server in one reply, for the page: what is wrong, the runs, the groups that close next."""

import shutil
import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from forebay.buffer.buffer import LiveRun
from forebay.server.engine_watch import EngineWatch, silent_in
from forebay.server.findings import run_findings
from forebay.server.routes.operations import retention_text, storage_text
from forebay.server.services import Services, services_of
from forebay.server.views import run_summary, storage_view
from forebay.web.replies import encode

Server = Annotated[Services, Depends(services_of)]

router = APIRouter(prefix="/v1", tags=["operations"])

MADE_EVERY_S = 1.0
MAX_RUNS = 50
MAX_OPEN_GROUPS = 20


class Overview:
    """The last reply, the same bytes for all who ask within a second."""

    def __init__(self) -> None:
        self._body, self._made_s = b"", -MADE_EVERY_S
        self.engines = EngineWatch()

    def body(self, services: Services) -> bytes:
        """The overview as JSON, at most ``MADE_EVERY_S`` old."""
        now_s = time.monotonic()
        if now_s - self._made_s >= MADE_EVERY_S:
            self._body, self._made_s = encode(_overview(services, self.engines)), now_s
        return self._body


@router.get("/overview")
async def overview(request: Request, services: Server) -> Response:
    """What is wrong, the storage, the newest runs with those that work, and the open groups that close next."""
    return Response(request.app.state.overview.body(services), media_type="application/json")


def _overview(services: Services, watch: EngineWatch) -> dict[str, Any]:
    buffer = services.buffer
    entries = buffer.entries[::-1]
    shown = [entry for entry in entries if not entry.run.has_ended]
    shown = (shown + [entry for entry in entries if entry.run.has_ended])[:MAX_RUNS]
    views = [(entry, run_summary(entry)) for entry in shown]
    texts = [storage_text(buffer), retention_text(services.retention.num_bytes_over)]
    findings = [{"text": text, "run_id": None} for text in texts if text != "ok"]
    engines = watch.rows([entry.run for entry in shown])
    silent = silent_in(engines)
    for entry, view in sorted(views, key=lambda each: not each[1]["is_stalled"]):
        findings += [{"text": text, "run_id": view["run_id"]} for text in run_findings(entry, view, silent)]
    closing = sorted((each for entry in shown for each in open_groups(entry)), key=lambda each: each["left_s"])
    return {
        "now_s": time.time(),
        "findings": findings,
        "storage": {**storage_view(buffer.store.stats(), services.retention), "num_free_bytes": _free_bytes(services)},
        "num_runs": len(entries),
        "runs": [view for _, view in views],
        "open_groups": closing[:MAX_OPEN_GROUPS],
        "engines": engines,
    }


def _free_bytes(services: Services) -> int | None:
    """Free bytes on the disk of the journal; None without a journal."""
    settings = services.settings
    return shutil.disk_usage(settings.data_dir).free if settings.store == "journal" else None


def open_groups(entry: LiveRun) -> list[dict[str, Any]]:
    """The open groups of a run that close next, with the active seconds left to them."""
    now_s = entry.buffer.active.now_s()
    return [
        {
            "run_id": entry.run.run_id,
            "group_id": group.group_id,
            "instance_id": group.row.instance_id,
            "epoch": group.row.epoch,
            "num_samples": group.row.num_samples,
            "num_failed": group.row.num_failed,
            "age_s": round(now_s - group.row.opened_s, 1),
            "left_s": round(due_s - now_s, 1),
            "is_idle": group.group_id in entry.buffer.groups.idle,
        }
        for due_s, group in entry.deadlines.soonest(MAX_OPEN_GROUPS)
    ]
