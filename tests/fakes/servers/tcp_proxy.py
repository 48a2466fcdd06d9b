"""A TCP proxy that can become a black hole: it accepts, reads, and never answers."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

_CHUNK_BYTES = 1 << 16
_503 = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class TcpProxy:
    """Passes connections to `host` on to `port` of this machine, for the time of a `with` block."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._server_port = port
        self._host = host
        self._swallows = threading.Event()
        self._refuses = threading.Event()
        self._fails = threading.Event()
        self._lock = threading.Lock()
        self._clients: dict[socket.socket, socket.socket | None] = {}
        self.accepted = 0

    def __enter__(self) -> Self:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind((self._host, 0))
        self._listener.listen(256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_all()

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    @property
    def connection_count(self) -> int:
        """The number of connections that its clients keep open."""
        with self._lock:
            return len(self._clients)

    def swallow(self) -> None:
        """From now on accept, read, and never answer; on the connections that exist too."""
        self._swallows.set()

    def refuse(self) -> None:
        """From now on the server looks dead: connections are cut, new ones are closed at once."""
        self._refuses.set()
        self._close_all()

    def answer_503(self) -> None:
        """From now on every HTTP request is answered by "503"; connections are cut first."""
        self._fails.set()
        self._close_all()

    def restore(self) -> None:
        """Serve again. Connections that were swallowed are cut: their state is lost."""
        if self._swallows.is_set():
            self._close_all()
        self._swallows.clear()
        self._refuses.clear()
        self._fails.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed by __exit__
                return
            self.accepted += 1
            if self._refuses.is_set():
                client.close()
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self._fails.is_set():
            with client, suppress(OSError):
                client.recv(_CHUNK_BYTES)
                client.sendall(_503)
            return
        server = None if self._swallows.is_set() else self._connect(client)
        with self._lock:
            self._clients[client] = server
        if server is not None:
            threading.Thread(target=self._forward_replies, args=(server, client), daemon=True).start()
        self._forward_requests(client, server)

    def _connect(self, client: socket.socket) -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", self._server_port))
        except OSError:
            client.close()
            return None

    def _forward_requests(self, client: socket.socket, server: socket.socket | None) -> None:
        """Read until the client hangs up: then, and only then, its connection is gone."""
        with suppress(OSError):
            while data := client.recv(_CHUNK_BYTES):
                if server is not None and not self._swallows.is_set():
                    server.sendall(data)
        self._close(client)

    def _forward_replies(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(_CHUNK_BYTES):
                if self._swallows.is_set():
                    return
                client.sendall(data)
        if not self._swallows.is_set():
            self._close(client)

    def _close(self, client: socket.socket) -> None:
        with self._lock:
            server = self._clients.pop(client, None)
        for connection in (client, server):
            if connection is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()

    def _close_all(self) -> None:
        with self._lock:
            clients = tuple(self._clients)
        for client in clients:
            self._close(client)
