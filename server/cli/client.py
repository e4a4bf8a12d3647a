"""The commands' view of the server: JSON in, JSON out, and errors with a remedy."""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Self

from forebay.core.errors import ForebayError, InvalidInput, RunNotFound

if TYPE_CHECKING:
    from forebay.client.calls.flow import Call, Lost, ServerReply

JSON_BODY = {"Content-Type": "application/json"}
MAX_CANDIDATES = 20
"""Maximum number of candidate runs that an error lists."""

View = dict[str, Any]


class NoServer(ForebayError, ConnectionError):
    """No server answers at the given address."""

    code = "no_server"
    status = 503


class ServerClient:
    """Calls the native API at ``url``. Raises ``ForebayError`` with the server's error, or ``NoServer``."""

    def __init__(self, url: str, token: str = "") -> None:
        # Imported here and below: commands that call no server, and each --help, start without an HTTP client.
        from forebay.client.calls.transport import Transport

        self._transport = Transport(url, token)
        self._url = url.rstrip("/")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def get(self, path: str, **query: str | int) -> dict[str, Any]:
        """Send a GET and return the reply."""
        from forebay.client.calls.flow import Call

        return self._ask(Call("GET", path, query=query or None))

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a POST and return the reply."""
        from forebay.client.calls.flow import Call

        return self._ask(Call("POST", path, _encoded(body or {}), JSON_BODY))

    def delete(self, path: str) -> dict[str, Any]:
        """Send a DELETE and return the reply."""
        from forebay.client.calls.flow import Call

        return self._ask(Call("DELETE", path))

    def save(self, path: str, write: Callable[[bytes], object]) -> None:
        """Send a GET and pass the reply, which may be long, to ``write`` as it arrives."""
        from forebay.client.calls.flow import Call, decoded

        call = Call("GET", path)
        reply = self._answered(self._transport.save(call, write))
        if reply.is_success:
            return
        try:
            decoded(reply, call)
        except ForebayError as error:
            raise self._as_refusal(error, reply.status) from None

    def download(self, path: str) -> bytes:
        """Send a GET and return the reply, whatever it contains."""
        pieces: list[bytes] = []
        self.save(path, pieces.append)
        return b"".join(pieces)

    def find_run(self, run: str) -> dict[str, Any]:
        """The run with this id or name, or a unique prefix of one. Selects and raises as ``pick_run`` does."""
        # For the names that an error suggests, the newest runs are enough.
        found = (self.runs(prefix=run) if run else []) or self.get("/v1/runs")["runs"]
        return pick_run(found[::-1], run)

    def runs(self, **query: str) -> list[dict[str, Any]]:
        """Every run that ``query`` selects, newest first."""
        from forebay.client.calls.flow import PAGE_RUNS

        found: list[dict[str, Any]] = []
        while True:
            page = self.get("/v1/runs", limit=PAGE_RUNS, **query)["runs"]
            found += page
            if len(page) < PAGE_RUNS:
                return found
            query["before"] = page[-1]["run_id"]

    def _ask(self, call: "Call") -> dict[str, Any]:
        from forebay.client.calls.flow import decoded

        reply = self._answered(self._transport.ask(call))
        try:
            return decoded(reply, call)
        except ForebayError as error:
            raise self._as_refusal(error, reply.status) from None

    def _answered(self, reply: "ServerReply | Lost") -> "ServerReply":
        from forebay.client.calls.flow import Lost

        if isinstance(reply, Lost):
            hint = "start one with `forebay serve`, or name another with --url"
            raise NoServer(f"no server answers at {self._url}: {reply.reason}", hint=hint)
        return reply

    @staticmethod
    def _as_refusal(error: ForebayError, status: int) -> ForebayError:
        # With the server's own class, such as InvalidInput, the command would exit as for a wrong flag.
        hint = "pass --token, or set FOREBAY_TOKEN" if status == 401 else error.hint
        return ForebayError(error.message, hint=hint, field=error.field)


def pick_run(views: Sequence[View], given: str) -> View:
    """Select the one of ``views`` (oldest first) that ``given`` names.

    An exact id wins, then the newest run with this exact name, then the only run whose id or name begins with
    ``given``; several runs of one name count as their newest. Raises ``InvalidInput`` if ``given`` is empty or
    ambiguous, ``RunNotFound`` if no run matches.
    """
    if not given:
        raise InvalidInput("RUN is empty", hint="give a run's id or name; `forebay status` lists them")
    by_id = {view["run_id"]: view for view in views}
    by_name = {view["name"]: view for view in views}  # of several with one name, the newest is kept
    for exact in (by_id, by_name):
        if given in exact:
            return exact[given]
    begun = {
        view["run_id"]: view for known in (by_id, by_name) for text, view in known.items() if text.startswith(given)
    }
    if not begun:
        near = get_close_matches(given, [text for text in (*by_id, *by_name) if text], n=3)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        message = f"the server has no run {given!r}"
        raise RunNotFound(given, message=message, hint=f"{meant}`forebay status` lists the runs")
    if len(begun) > 1:
        hint = "give more of the id, or the whole name"
        raise InvalidInput(f"{given!r} could be any of {_listed(list(begun.values()))}", hint=hint)
    return next(iter(begun.values()))


def _listed(views: Sequence[View]) -> str:
    lines = [f"  {view['run_id']}  {view['name'] or '-'}  {view['task_type']}" for view in views[-MAX_CANDIDATES:]]
    num_left = len(views) - len(lines)
    return "\n".join([f"{len(views)} runs:", *lines, *([f"  and {num_left} older ones"] if num_left else [])])


def _encoded(body: dict[str, Any]) -> bytes:
    for name, value in body.items():
        try:
            _json({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            hint = "JSON has UTF-8 text, finite numbers, true, false, null, lists and objects; write a date as a string"
            raise InvalidInput(f"{name!a} cannot be sent as JSON: {error}", hint=hint) from None
    return _json(body)


def _json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
