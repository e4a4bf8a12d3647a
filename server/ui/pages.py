"""Serves the files of the page, with headers that let it load and ask nothing but this server."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

ASSETS = Path(__file__).with_name("assets")
PLOTLY = "plotly.min.js"
_POLICY = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
)
_STRICT = f"{_POLICY}style-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'"
_WITH_CHARTS = f"{_POLICY}style-src 'self' 'unsafe-inline'"
"""Plotly writes style elements and sets HTML."""
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",  # asks each time, so that a new release's modules never mix with old ones
}


class UiPages(StaticFiles):
    """The files of ``assets/``; ``/ui/`` and ``/ui/charts`` are one page under two policies."""

    def __init__(self) -> None:
        super().__init__(directory=ASSETS)

    async def get_response(self, path: str, scope: Scope) -> Response:
        found = await super().get_response("index.html" if path in (".", "charts") else path, scope)
        found.headers.update(_HEADERS)
        found.headers["content-security-policy"] = _WITH_CHARTS if path == "charts" else _STRICT
        return found

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        if path != PLOTLY:
            return super().lookup_path(path)
        # The file of the installed package: importing plotly would cost the server some 30 MB.
        spec: Any = find_spec("plotly")
        if spec is None:
            raise HTTPException(404, "charts need plotly: pip install 'forebay[report]'")
        file = Path(spec.submodule_search_locations[0]) / "package_data" / PLOTLY
        return str(file), file.stat()
