"""The routes by which the server registers runs, and runs open and close rollouts."""

import secrets

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.errors import Unauthorized
from forebay.gateway.request_bodies import OpenRollout, RegisterRun, key_of
from forebay.gateway.runs.registry import Desk
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.spec import GatewaySpec
from forebay.web.bodies import BodyBudget
from forebay.web.request_models import Model, parse


class ControlRoutes:
    """Errors are told as on the server's native routes."""

    def __init__(self, spec: GatewaySpec, desk: Desk, bodies: BodyBudget) -> None:
        self._spec = spec
        self._desk = desk
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/gateway/healthz", self.health),
            Route("/gateway/runs/{run_id}", self.register, methods=["PUT"]),
            Route("/gateway/runs/{run_id}", self.forget, methods=["DELETE"]),
            Route("/gateway/rollouts", self.open, methods=["POST"]),
            Route("/gateway/rollouts/{rollout_id}", self.show),
            Route("/gateway/rollouts/{rollout_id}/close", self.close, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        """The gateway answers."""
        return JSONResponse({"status": "ok"})

    async def register(self, request: Request) -> Response:
        """Make a run known, or change what is known of it."""
        self._check_server(request)
        await self._desk.register(request.path_params["run_id"], await self._body(RegisterRun, request))
        return JSONResponse({"run_id": request.path_params["run_id"]})

    async def forget(self, request: Request) -> Response:
        """End all calls of a run, and refuse its keys."""
        self._check_server(request)
        await self._desk.forget(request.path_params["run_id"])
        return JSONResponse({"run_id": request.path_params["run_id"]})

    async def open(self, request: Request) -> Response:
        """Open a rollout: where its agent is to call, and with which key."""
        run = self._run_of(request)
        rollout = self._desk.open(run, await self._body(OpenRollout, request))
        base = f"{self._spec.url}/gateway/{rollout.rollout_id}"
        told = {"base_url": f"{base}/v1", "anthropic_url": f"{base}/anthropic", "key": rollout.key}
        return JSONResponse({"rollout_id": rollout.rollout_id, **told}, status_code=201)

    async def show(self, request: Request) -> Response:
        """The record so far."""
        rollout = self._desk.rollout(self._run_of(request), request.path_params["rollout_id"])
        return JSONResponse(await rollout.record())

    async def close(self, request: Request) -> Response:
        """Abort what is in flight, revoke the key, and tell the record; asked again, the same."""
        told = await self._desk.close(self._run_of(request), request.path_params["rollout_id"])
        return Response(told, media_type="application/json")

    def _run_of(self, request: Request) -> GatewayRun:
        return self._desk.run_of(key_of(request))

    def _check_server(self, request: Request) -> None:
        if not secrets.compare_digest(key_of(request).encode(), self._spec.control_key.encode()):
            raise Unauthorized("only the server may call this")

    async def _body(self, model: type[Model], request: Request) -> Model:
        held = await self._bodies.read(request.scope, request.receive)
        try:
            return parse(model, held.data)
        finally:
            held.free()
