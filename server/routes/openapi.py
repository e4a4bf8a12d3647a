"""Additions to the framework's document at ``/openapi.json``.

The framework does not know the routes that carry samples, or the bodies that routes read themselves.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from forebay.core.records.notes import Note
from forebay.core.run import RunSettings
from forebay.generators.buffer_link.abc import ProgressReport
from forebay.server.routes.batches import CheckpointRequest, ExtendRequest, RewindRequest
from forebay.server.routes.read_batches import BatchRequest, SlimeReadBody
from forebay.server.routes.read_parts import PartsRequest
from forebay.server.routes.weights import ContinueRequest, PauseRequest, WeightVersionRequest


class StartBody(RunSettings):
    """Body of a start. All of it is passed to ``run_rollout``; unlisted fields are the generator's own."""

    model_config = ConfigDict(extra="allow")

    task_type: str
    input_file: str | None = None
    num_epoch: int | None = None
    remote_engine_url: str | list[str] | None = None
    skip_instance_ids: list[str | int] | None = None
    name: str | None = None
    run_id: str | None = None
    start_id: str | None = None
    capture: bool | None = None


_SAMPLE = {
    "type": "object",
    "required": ["uid", "instance_id", "messages"],
    "properties": {
        "uid": {"type": "string"},
        "instance_id": {"type": ["string", "integer"]},
        "messages": {"type": "array"},
        "reward": {"type": "number"},
        "reward_parts": {"type": "object", "additionalProperties": {"type": "number"}},
        "epoch": {"type": "integer"},
        "slot": {"type": "integer"},
        "status": {"enum": ["completed", "failed"]},
    },
    "additionalProperties": True,
}
_SAMPLES = {"oneOf": [_SAMPLE, {"type": "array", "items": _SAMPLE}]}
_NOTE = {"$ref": "#/components/schemas/Note"}
_NOTES = {"oneOf": [_NOTE, {"type": "array", "items": _NOTE}]}

Schema = dict[str, Any] | type[BaseModel]

SAMPLE_PATHS: dict[str, tuple[str, str, Schema]] = {
    "/buffer/write": ("slime", "Store one sample of the default stream's run.", _SAMPLE),
    "/s/{name}/buffer/write": ("slime", "Store one sample of a named stream's run.", _SAMPLE),
    "/w/{run_key}/buffer/write": ("run process", "Store one sample of the run with this key.", _SAMPLE),
    "/w/{run_key}/samples": ("run process", "Store samples of the run with this key.", _SAMPLES),
    "/get_rollout_data": ("slime", "Read finished groups of the default stream.", SlimeReadBody),
    "/s/{name}/get_rollout_data": ("slime", "Read finished groups of a named stream.", SlimeReadBody),
    "/buffer/read": ("slime", "Read finished groups, waiting for them if asked to.", SlimeReadBody),
    "/s/{name}/buffer/read": ("slime", "Read finished groups of a named stream, waiting for them.", SlimeReadBody),
    "/v1/runs/{run_id}/samples": ("samples", "Store one sample or an array; each gets its own result.", _SAMPLES),
    "/v1/runs/{run_id}/batches": ("batches", "Lease whole groups, waiting up to wait_s for them.", BatchRequest),
    "/v1/runs/{run_id}/batches/{batch_id}/parts": ("batches", "Read parts of the batch's samples.", PartsRequest),
    "/v1/runs/{run_id}/batches/{batch_id}/annotations": ("batches", "Store numbers of the batch's samples.", _NOTES),
}

_RUN = "/v1/runs/{run_id}"
BODIES: dict[tuple[str, str], Schema] = {
    ("post", "/start_rollout"): StartBody,
    ("post", "/s/{name}/start_rollout"): StartBody,
    ("post", "/v1/runs"): StartBody,
    ("post", f"{_RUN}/batches/{{batch_id}}/extend"): ExtendRequest,
    ("post", f"{_RUN}/checkpoints"): CheckpointRequest,
    ("post", f"{_RUN}/rewind"): RewindRequest,
    ("put", f"{_RUN}/weight_version"): WeightVersionRequest,
    ("post", f"{_RUN}/engines/pause"): PauseRequest,
    ("post", f"{_RUN}/engines/continue"): ContinueRequest,
    ("post", "/w/{run_key}/progress"): {"$ref": "#/components/schemas/ProgressReport"},
}
"""Bodies that the framework's routes read themselves, within the limits on bodies."""


def complete_document(app: FastAPI) -> None:
    """Add the sample routes and all bodies to ``app.openapi()``, and make ``app`` answer 405 on paths of sample routes.

    Call it once ``app`` has all its routes.
    """
    # Last: if the framework has a route for another method, that route answers.
    app.router.routes += [Route(path, _OtherMethods(app, path), include_in_schema=False) for path in SAMPLE_PATHS]
    framework = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:  # FastAPI caches the document, with these paths in it
            document = framework()
            for path, described in SAMPLE_PATHS.items():
                document["paths"].setdefault(path, {})["post"] = _operation(path, *described[:2])
            _add_bodies(document)
        return framework()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document


def _add_bodies(document: dict[str, Any]) -> None:
    bodies = {("post", path): body for path, (_, _, body) in SAMPLE_PATHS.items()} | BODIES
    models = [(body, "validation") for body in bodies.values() if isinstance(body, type)]
    refs, schemas = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    _, structs = msgspec.json.schema_components([ProgressReport, Note], ref_template="#/components/schemas/{name}")
    document["components"]["schemas"] |= schemas["$defs"] | structs
    for (method, path), body in bodies.items():
        content = {"application/json": {"schema": refs[body, "validation"] if isinstance(body, type) else body}}
        document["paths"][path][method]["requestBody"] = {"required": path in SAMPLE_PATHS, "content": content}


class _OtherMethods:
    """Answers 405 on the path of a sample route, with the methods that the document allows there."""

    def __init__(self, app: FastAPI, path: str) -> None:
        self._app = app
        self._path = path

    async def __call__(self, _scope: Scope, _receive: Receive, _send: Send) -> None:
        allowed = sorted(method.upper() for method in self._app.openapi()["paths"][self._path])
        raise HTTPException(405, headers={"Allow": ", ".join(allowed)})


def _operation(path: str, tag: str, summary: str) -> dict[str, Any]:
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    return {
        "tags": [tag],
        "summary": summary,
        "parameters": [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names],
        "responses": {"200": {"description": "OK"}},
    }
