"""Many requests over one connection, with a client that costs little and lets every wrong body through."""

import http.client
from collections import Counter
from collections.abc import Mapping

LIMIT_S = 60.0


class Asker:
    """Sends bodies to one address, counts the statuses, and keeps what was answered with a 5xx."""

    def __init__(self, host: str, port: int, headers: Mapping[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=LIMIT_S)
        self._headers = dict(headers or {})
        self.statuses: Counter[int] = Counter()
        self.bad: list[tuple[str, int, bytes, bytes]] = []
        """Path, status, reply and body."""

    def ask(self, method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body of the reply. Raises ``OSError`` if there is none."""
        sent = {"Content-Type": "application/json", **self._headers, **(headers or {})}
        try:
            self._connection.request(method, path, body, sent)
            response = self._connection.getresponse()
            reply = response.read()
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
            self._connection.close()  # the next request opens it anew
            raise
        self.statuses[response.status] += 1
        if response.status >= 500:
            self.bad.append((path, response.status, reply[:500], body[:2_000]))
        return response.status, reply

    def close(self) -> None:
        self._connection.close()
