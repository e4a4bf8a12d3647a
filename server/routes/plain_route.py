"""What the hot routes have in common."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from forebay.buffer.buffer import Entry
from forebay.core.errors import ForebayError
from forebay.server.services import Services
from forebay.web.replies import HeldBody, encode, error_body, error_headers, send_json

Find = Callable[[Services, str], Entry]
"""How a route finds its run: by name, by key or by id."""


class Call(NamedTuple):
    """One request: its run, its body, and the wire."""

    services: Services
    entry: Entry
    body: bytes
    held: HeldBody
    """The room that the body takes; more is to be reserved for what comes out of a compressed one."""
    scope: Scope
    receive: Receive
    send: Send

    def header(self, name: bytes) -> bytes:
        """The value of a header, given in lower case; several are joined with commas."""
        return b",".join(value for key, value in self.scope["headers"] if key == name)


class HotRoute(ABC):
    """Finds the run, reads the body, answers, and tells errors in its own form. Holds nothing of a request."""

    async def __call__(
        self, services: Services, find: Find, name: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        held: HeldBody | None = None
        try:
            entry = find(services, name)
            held = await services.bodies.read(scope, receive)
            await self.answer(Call(services, entry, held.data, held, scope, receive, send))
        except ForebayError as error:
            await send_json(send, error.status, encode(self.told(error)), error_headers(error))
        finally:
            if held is not None:
                held.free()

    @abstractmethod
    async def answer(self, call: Call) -> None:
        """Do what the route is for."""

    def told(self, error: ForebayError) -> dict[str, object]:
        """The body of an error reply."""
        return error_body(error)


class SlimeRoute(HotRoute):
    """Tells errors in slime's envelope."""

    def told(self, error: ForebayError) -> dict[str, object]:
        return {"success": False, "message": error.message, "data": None, **error_body(error)}
