"""The served page: a small HTTP server on 127.0.0.1 that answers the page's form.

Only this machine is answered, and only pages that it served.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hocket.errors import HocketError, UsageError
from hocket.page.api import Given, answer, served, trace
from hocket.page.document import document

HOST = "127.0.0.1"


class Server(ThreadingHTTPServer):
    """Serves the page of what was given; `url` is its address."""

    daemon_threads = True

    def __init__(self, given: Given, port: int = 0) -> None:
        """Raises: UsageError where the port is taken."""
        self.given = given
        form = served(given)
        self.page = document({**answer(given, form["asked"]), "served": form}).encode()
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"port {port} cannot be used: {why}; leave out --port for a free one"
            ) from None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self.server_address[1]

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self.port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that went away is no news; anything else is."""
        import sys

        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server  # ty: ignore[incompatible-mutable-override]

    def do_GET(self) -> None:
        """Answers one request."""
        if self.headers.get("Host") not in {f"{h}:{self.server.port}" for h in (HOST, "localhost")}:
            self._send(403, "text/plain", b"hocket answers to 127.0.0.1 only\n")
            return
        url = urlsplit(self.path)
        foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if foreign and url.path != "/":  # a link to the page may stand anywhere
            self._send(403, "text/plain", b"hocket answers its own page only\n")
            return
        words = dict(parse_qsl(url.query, keep_blank_values=True))
        known = {"/": self._page, "/view": self._view, "/trace": self._trace}
        known.get(url.path, self._nothing)(words)

    def _page(self, words: dict[str, str]) -> None:
        self._send(200, "text/html; charset=utf-8", self.server.page)

    def _view(self, words: dict[str, str]) -> None:
        try:
            data = answer(self.server.given, words)
        except HocketError as error:
            data = {"error": str(error)}
        self._send(200, "application/json", json.dumps(data).encode())

    def _trace(self, words: dict[str, str]) -> None:
        try:
            self._send(200, "application/octet-stream", trace(self.server.given, words))
        except HocketError as error:
            self._send(400, "application/json", json.dumps({"error": str(error)}).encode())

    def _nothing(self, words: dict[str, str]) -> None:
        self._send(404, "text/plain", b"there is only /\n")

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind), ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
        ):  # fmt: skip
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: the terminal belongs to the user."""
