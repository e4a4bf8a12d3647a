"""An engine that numbers its answers to each prompt, counts them, and stops at a budget."""

import json
import select
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class CountingEngine:
    """Answers a prompt with "1", then "2", and so on. With a ``budget``, calls beyond it wait for ``allow``."""

    def __init__(self, budget: int | None = None) -> None:
        self.calls: Counter[str] = Counter()
        """Answers given, by prompt."""
        self._left = budget
        self._changed = threading.Condition()
        self._is_closing = False
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                number = engine._take(body["messages"][0]["content"], self)
                if number:
                    self._answer({"choices": [{"message": {"role": "assistant", "content": str(number)}}]})

            def _answer(self, told: object) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(told).encode())

            def log_message(self, *_: object) -> None:
                """Nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def allow(self, num: int | None) -> None:
        """Give ``num`` answers more; None for as many as are asked for."""
        with self._changed:
            self._left = None if num is None or self._left is None else self._left + num
            self._changed.notify_all()

    def taken(self) -> "Counter[str]":
        """The answers given since this was last asked."""
        with self._changed:
            calls, self.calls = self.calls, Counter()
        return calls

    def _take(self, prompt: str, handler: BaseHTTPRequestHandler) -> int:
        """The number of this answer; 0 if the caller is gone by the time there is one for it."""
        with self._changed:
            while self._left == 0 and not self._is_closing:
                self._changed.wait()
            if self._is_closing or _is_gone(handler):
                return 0
            if self._left is not None:
                self._left -= 1
            self.calls[prompt] += 1
            return self.calls[prompt]


def _is_gone(handler: BaseHTTPRequestHandler) -> bool:
    """A caller that waits says nothing: readable means that it hung up."""
    return bool(select.select([handler.connection], [], [], 0)[0])
