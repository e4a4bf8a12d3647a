"""Routes with which the server registers runs, and runs open and close rollouts."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.binary_sample import SAMPLES_TYPE, is_samples, split_samples
from forebay.core.errors import InvalidInput
from forebay.gateway.request_bodies import OpenRollout, RegisterRun
from forebay.gateway.runs.registry import RunRegistry, key_of
from forebay.gateway.runs.run import GatewayRun
from forebay.gateway.spec import GatewaySpec
from forebay.web.bodies import BodyBudget
from forebay.web.request_models import Model, parse

BROKEN_WAIT_S = 20.0
MAX_DIGITS = 16


class ControlRoutes:
    """The control routes. Their errors have the same body as the server's native routes."""

    def __init__(self, spec: GatewaySpec, registry: RunRegistry, bodies: BodyBudget) -> None:
        self._spec = spec
        self._registry = registry
        self._bodies = bodies

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            Route("/gateway/healthz", self.health),
            Route("/gateway/runs/{run_id}", self.register, methods=["PUT"]),
            Route("/gateway/runs/{run_id}", self.forget, methods=["DELETE"]),
            Route("/gateway/rollouts", self.open, methods=["POST"]),
            Route("/gateway/rollouts/{rollout_id}", self.show),
            Route("/gateway/broken", self.broken),
            Route("/gateway/rollouts/{rollout_id}/close", self.close, methods=["POST"]),
        ]

    async def health(self, _: Request) -> Response:
        """Report that the gateway answers."""
        return JSONResponse({"status": "ok"})

    async def register(self, request: Request) -> Response:
        """Register a run, or update its registration."""
        self._registry.check_server(key_of(request))
        await self._registry.register(request.path_params["run_id"], await self._body(RegisterRun, request))
        return JSONResponse({"run_id": request.path_params["run_id"]})

    async def forget(self, request: Request) -> Response:
        """End all calls of a run and revoke its keys."""
        self._registry.check_server(key_of(request))
        await self._registry.forget(request.path_params["run_id"])
        return JSONResponse({"run_id": request.path_params["run_id"]})

    async def open(self, request: Request) -> Response:
        """Open a rollout and return its base URLs and its key."""
        run = self._run_of(request)
        rollout = self._registry.open(run, await self._body(OpenRollout, request))
        base = f"{self._spec.url}/gateway/{rollout.rollout_id}"
        urls = {"base_url": f"{base}/v1", "anthropic_url": f"{base}/anthropic"}
        return JSONResponse({"rollout_id": rollout.rollout_id, **urls, "key": rollout.key}, status_code=201)

    async def show(self, request: Request) -> Response:
        """Return the record so far."""
        rollout = self._registry.rollout(self._run_of(request), request.path_params["rollout_id"])
        return JSONResponse(await rollout.record())

    async def broken(self, request: Request) -> Response:
        """Return the rollouts capped after the first ``after`` ones; waits up to ``BROKEN_WAIT_S`` seconds for one."""
        after, capped = request.query_params.get("after", "0"), self._run_of(request).capped
        if not (after.isascii() and after.isdecimal() and len(after) < MAX_DIGITS):
            raise InvalidInput(f"after must be a whole number (got {after[:MAX_DIGITS]!r})", field="after")
        names = await capped.after(int(after), BROKEN_WAIT_S)
        return JSONResponse({"rollouts": names, "last": capped.num})

    async def close(self, request: Request) -> Response:
        """Abort calls in flight, revoke the key, and return the record; repeated calls return the same record."""
        record = await self._registry.close(self._run_of(request), request.path_params["rollout_id"])
        # Its parts go only to callers that ask for the frames.
        if is_samples(request.headers.get("accept", "").encode()):
            return Response(record, media_type=SAMPLES_TYPE)
        return Response(split_samples(record)[-1], media_type="application/json")

    def _run_of(self, request: Request) -> GatewayRun:
        return self._registry.run_of(key_of(request))

    async def _body(self, model: type[Model], request: Request) -> Model:
        body = await self._bodies.read(request.scope, request.receive)
        try:
            return parse(model, body.data)
        finally:
            body.free()
