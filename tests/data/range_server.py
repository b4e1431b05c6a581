"""A web server on this machine that serves a folder by ranges, and can misbehave."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Trouble = Callable[[BaseHTTPRequestHandler, int], bool]  # of the n-th request: whether it has dealt with it


@dataclass
class Served:
    """What a server has answered: (path, first byte, bytes) of each request."""

    address: str
    folder: Path
    ranges: bool = True
    tags: bool = True
    trouble: Trouble = lambda handler, number: False
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sent(self) -> int:
        return sum(size for _, _, size in self.requests)


def drop_connections(every: int) -> Trouble:
    """Every n-th reply ends in its middle."""

    def drop(handler: BaseHTTPRequestHandler, number: int) -> bool:
        if number % every:
            return False
        start = int(handler.headers["Range"].removeprefix("bytes=").partition("-")[0])
        handler.send_response(206)
        handler.send_header("Content-Range", f"bytes {start}-{start + 99_999}/{start + 100_000}")
        handler.send_header("Content-Length", "100000")
        handler.end_headers()
        handler.wfile.write(b"x")
        handler.close_connection = True
        return True

    return drop


def busy_at_first(times: int) -> Trouble:
    def refuse(handler: BaseHTTPRequestHandler, number: int) -> bool:
        if number > times:
            return False
        handler.send_response(503)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return refuse


def refuse_access(handler: BaseHTTPRequestHandler, number: int) -> bool:
    """Refuse all but the start of a file, as a signed address does from a certain time on."""
    if handler.headers["Range"].startswith("bytes=0-"):
        return False
    handler.send_response(403)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    served = Served("", folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            with served.lock:
                served.requests.append((self.path, 0, 0))
                number = len(served.requests)
            if served.trouble(self, number):
                return
            path = served.folder / self.path.lstrip("/").partition("?")[0]
            if not path.is_file():
                self.send_response(404)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = path.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if served.ranges else None
            start, end = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
            if wanted and start >= len(data):
                self.send_response(416)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if wanted else 200)
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
            if served.tags:
                self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()[:16]}"')
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            with served.lock:
                served.requests[number - 1] = (self.path, start, end - start)
            self.wfile.write(data[start:end])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    served.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
