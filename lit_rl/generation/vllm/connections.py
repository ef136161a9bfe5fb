"""HTTP connections that another thread may cut: a thread that waits for an answer on one of them then fails."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import urllib.request
import weakref
from typing import Any


class Connections:
    """The connections of some calls. Threads may share it."""

    def __init__(self) -> None:
        self._lock, self._is_cut = threading.Lock(), False
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def handlers(self) -> list[urllib.request.BaseHandler]:
        """Return the handlers of an opener with these connections."""
        opened = self._opened

        class Plain(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        class Encrypted(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                opened(self.sock)

        class PlainHandler(urllib.request.HTTPHandler):
            def http_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Plain, req)

        class EncryptedHandler(urllib.request.HTTPSHandler):
            def https_open(self, req: urllib.request.Request) -> Any:
                return self.do_open(Encrypted, req, context=self._context)  # pyright: ignore  # read once, as theirs is

        return [PlainHandler(), EncryptedHandler()]

    def cut(self) -> None:
        """End all calls in flight, and all later ones. A server then drops their requests too."""
        with self._lock:
            self._is_cut = True
            left = list(self._open)
        for each in left:
            with contextlib.suppress(OSError):  # it has ended by itself
                each.shutdown(socket.SHUT_RDWR)

    def _opened(self, connection: socket.socket) -> None:
        with self._lock:
            if self._is_cut:
                raise ConnectionAbortedError("the call was given up")
            self._open.add(connection)
