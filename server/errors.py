"""Turns every error into a reply: one body for native routes, wrapped in slime's envelope on slime's routes."""

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from forebay.core.errors import ForebayError
from forebay.web.replies import ClientGone, error_body, error_headers

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; no standard status exists."""


def add_error_handlers(app: FastAPI) -> None:
    """Make ``app`` answer every error in the same form."""
    app.add_exception_handler(ForebayError, _forebay_error)
    app.add_exception_handler(RequestValidationError, _invalid_request)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)  # otherwise it would be logged as a server error
    app.add_exception_handler(Exception, _internal_error)


def reply(request: Request, error: ForebayError) -> JSONResponse:
    """The reply to ``error``."""
    body = error_body(error)
    # slime's envelope under /w/ too: generators written for slime get this address for their buffer.
    if not request.url.path.startswith("/v1/"):
        message = f"{error.message} ({error.hint})" if error.hint else error.message
        body = {"success": False, "message": message, "data": None, **body}
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return JSONResponse(body, status_code=error.status, headers=headers)


async def _forebay_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ForebayError)
    return reply(request, error)


async def _invalid_request(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]  # its location begins with query, path or header
    name = ".".join(str(part) for part in first["loc"][1:]) or "body"
    body = {"code": "invalid_input", "message": f"{name}: {first['msg']}", "hint": "", "field": name}
    return JSONResponse({"error": body}, status_code=422)


async def _http_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    code = {404: "no_such_route", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    body = {"code": code, "message": str(error.detail), "hint": "GET /openapi.json lists the routes"}
    return JSONResponse({"error": body}, status_code=error.status_code, headers=error.headers)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    """Ends a request whose client has left; this is not a server error."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> JSONResponse:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    body = {"code": "internal_error", "message": f"{type(error).__name__}: {error}", "hint": "see the server's log"}
    return JSONResponse({"error": body}, status_code=500)
