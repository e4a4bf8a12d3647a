"""Where a request carries its key."""

from starlette.requests import Request

BEARER = "bearer "


def key_of(request: Request) -> str:
    """The bearer token or, as Anthropic's clients send it, ``x-api-key``; empty if there is none."""
    told = request.headers.get("authorization", "")
    if told[: len(BEARER)].lower() == BEARER:
        return told[len(BEARER) :].strip()
    return request.headers.get("x-api-key", "")
