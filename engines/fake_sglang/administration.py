"""What is asked of an engine beside answers: that calls end, that it waits, that it takes other weights."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.backend import Administered
from forebay.engines.fake_sglang.request_bodies import AbortBody, PauseBody, VersionBody, WeightsBody


class Administration:
    """Each method but ``routes`` answers one route."""

    def __init__(self, backend: Administered) -> None:
        self._backend = backend

    def routes(self) -> list[Route]:
        """All of them, each by ``POST``."""
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
        """End calls by the beginning of their ``rid``, or all; they answer 200 with what they have."""
        body = AbortBody.read(await request.body())
        # To the back end an empty prefix means every call; SGLang takes an empty ``rid`` for none.
        if body.abort_all or body.rid:
            self._backend.abort("" if body.abort_all else body.rid or "")
        return Response()

    async def pause(self, request: Request) -> Response:
        """Generate nothing until ``/continue_generation``."""
        body = PauseBody.read(await request.body())
        await self._backend.pause(body.mode)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _: Request) -> Response:
        """Go on after a pause."""
        await self._backend.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weights(self, request: Request) -> Response:
        """Go on with the weights in another folder. One that does not fit is a 400, and nothing changes."""
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
        """Call the weights something else from the next token on."""
        body = VersionBody.read(await request.body())
        if body.abort_all_requests:
            self._backend.abort("")
        await self._backend.name_weights(body.new_version)
        message = f"Weight version updated to {body.new_version}"
        return JSONResponse({"success": True, "message": message, "new_version": body.new_version})

    async def flush_cache(self, _: Request) -> Response:
        """Forget the prompts that were read."""
        await self._backend.flush_cache()
        return Response()
