"""Administrative routes of an engine: abort calls, pause, and update weights."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.backend import Administered
from forebay.engines.fake_sglang.request_bodies import AbortBody, PauseBody, VersionBody, WeightsBody


class Administration:
    """The administrative routes; each method except ``routes`` serves one."""

    def __init__(self, backend: Administered) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        """Return all routes, each with method ``POST``."""
        sent = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/update_weights_from_disk": self.update_weights,
            "/update_weight_version": self.name_weights,
            "/flush_cache": self.flush_cache,
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in sent.items()]

    async def abort(self, request: Request) -> Response:
        """Abort calls by a prefix of their ``rid``, or all calls; they return 200 with their tokens so far."""
        body = AbortBody.read(await request.body())
        # For the back end an empty prefix matches every call; for SGLang an empty `rid` matches none.
        if body.abort_all or body.rid:
            self._backend.abort("" if body.abort_all else body.rid or "")
        return Response()

    async def pause(self, request: Request) -> Response:
        """Pause generation until ``/continue_generation``."""
        body = PauseBody.read(await request.body())
        await self._backend.pause(body.mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: Request) -> Response:
        """Resume after a pause."""
        await self._backend.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        """Load the weights in another folder. Weights that do not fit return 400 and change nothing."""
        body = WeightsBody.read(await request.body())
        if body.abort_all_requests:
            self._backend.abort("")
        named = f" Weight version updated to {body.weight_version}." if body.weight_version else ""
        reply = {"success": True, "message": f"Succeeded to update model weights.{named}", "num_paused_requests": 0}
        try:
            await self._backend.update_weights(body)
        except InvalidInput as error:
            return JSONResponse({**reply, "success": False, "message": error.message}, status_code=400)
        return JSONResponse(reply)

    async def name_weights(self, request: Request) -> Response:
        """Rename the weights from the next token on."""
        body = VersionBody.read(await request.body())
        if body.abort_all_requests:
            self._backend.abort("")
        await self._backend.name_weights(body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def flush_cache(self, _: Request) -> Response:
        """Clear the prompt cache."""
        await self._backend.flush_cache()
        return Response()
