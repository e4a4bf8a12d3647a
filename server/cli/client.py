"""The server as the commands see it: JSON in, JSON out, and errors that say what to do."""

import json
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from forebay.core.addresses import is_loopback
from forebay.core.errors import ForebayError, InvalidInput

TIMEOUT_S = 30.0


class ServerClient:
    """Calls the native API at ``url``. Raises ``ForebayError`` with what the server said, or that nobody answers."""

    def __init__(self, url: str, token: str = "") -> None:
        _check_address(url)
        if token and not (token.isascii() and token.isprintable()):
            raise InvalidInput("the token has characters that no header can hold", hint="pass the server's own --token")
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=TIMEOUT_S,
            trust_env=not is_local(url),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **params: str | int) -> dict[str, Any]:
        """The reply to a GET."""
        return self._call("GET", path, params=params)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The reply to a POST."""
        return self._call("POST", path, content=_encoded(body or {}), headers={"content-type": "application/json"})

    def find_run(self, run: str) -> dict[str, Any]:
        """The run with this id; else the newest that was started under this name. An empty one is ``InvalidInput``."""
        if not run:
            raise InvalidInput("RUN is empty", hint="give a run's id or name; `forebay status` lists them")
        views: list[dict[str, Any]] = self.get("/v1/runs")["runs"]
        matching = [view for view in views if run in (view["run_id"], view["name"])]
        if not matching:
            raise ForebayError(f"the server knows no run {run!r}", hint="`forebay status` lists the runs")
        return matching[-1]

    def _call(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, **given)
        except httpx.HTTPError as error:
            raise ForebayError(
                f"no server answers at {self.url}: {error}",
                hint="start one with `forebay serve`, or name another with --url",
            ) from None
        if reply.is_error:
            raise _refusal(reply)
        return _object(reply)


def is_local(url: str) -> bool:
    """Whether a URL is this machine's own, for which no proxy is asked."""
    return is_loopback(urlsplit(url).hostname or "")


def _check_address(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        httpx.URL(url)
    except (ValueError, httpx.InvalidURL):  # brackets that do not match, a port that is none
        is_address = False
    if not is_address:
        raise InvalidInput(f"{url!r} is not a server's address", hint="it looks like http://127.0.0.1:8889")


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


def _object(reply: httpx.Response) -> dict[str, Any]:
    try:
        value = reply.json()
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise ForebayError(f"{reply.url} does not answer as Forebay does", hint="is --url the address of a Forebay server?")


def _refusal(reply: httpx.Response) -> ForebayError:
    told = _object(reply).get("error")
    if not isinstance(told, dict) or "message" not in told:
        return ForebayError(f"{reply.url} answered {reply.status_code}", hint="is --url a Forebay server?")
    hint = str(told.get("hint") or "")
    if reply.status_code == httpx.codes.UNAUTHORIZED:
        hint = "pass --token, or set FOREBAY_TOKEN"
    return ForebayError(str(told["message"]), hint=hint)
