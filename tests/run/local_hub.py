"""A local hub that answers fetch requests over real sockets."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class LocalHub:
    """`repositories` has the files of each id. `status` is sent for paths with its key; `cut` truncates a file once."""

    url: str = ""
    cache: Path = Path()
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    status: dict[str, tuple[int, str]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    listing: dict[str, Any] = field(default_factory=dict)  # in place of what is true
    ranged: bool = True  # whether range ends, and ranges of checkpoints, are respected
    headers: dict[str, str] = field(default_factory=dict)  # in place of what is true
    requests: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range

    def holds(self, name: str, folder: Path) -> None:
        """Serve a folder as a repository."""
        found = [path for path in folder.rglob("*") if path.is_file()]
        self.repositories[name] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}

    def fetched(self) -> list[str]:
        """The requested files, in order."""
        return [
            path.partition("/resolve/")[2].partition("/")[2]
            for how, path, _ in self.requests
            if how == "GET" and "/resolve/" in path
        ]


class Answer(BaseHTTPRequestHandler):
    """The responses of the hub. A subclass sets `hub`."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range", "")))
        for part, (code, error) in self.hub.status.items():
            if part in path:
                return self.send(code, b"", {"X-Error-Code": error} if error else {})
        if path.startswith("/api/models/"):
            name, _, rest = path.removeprefix("/api/models/").partition("/tree/")
            name, _, _ = name.partition("/revision/")
            if name not in self.hub.repositories:
                return self.send(404, b"", {"X-Error-Code": "RepoNotFound"})
            if rest:
                files = self.hub.repositories[name].items()
                tree = [{"type": "file", "path": file, "size": len(data), "oid": COMMIT} for file, data in files]
                return self.send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            siblings = [{"rfilename": file, "size": len(data)} for file, data in self.hub.repositories[name].items()]
            body = {"id": name, "sha": COMMIT, "siblings": siblings} | self.hub.listing
            return self.send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})
        name, _, rest = path[1:].partition("/resolve/")
        file = rest.partition("/")[2]
        data = self.hub.repositories.get(name, {}).get(file)
        if data is None:
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"})
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        if last and not self.hub.ranged:
            first = last = ""
        begin, end = int(first or 0), int(last or len(data) - 1) + 1
        known = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'} | self.hub.headers
        if begin or last:
            known["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        if self.command == "GET" and file in self.hub.cut:
            end = self.hub.cut.pop(file)
            self.hub.status[file] = (503, "")
            return self.send(200, data[:end], known, length=len(data))
        return self.send(206 if begin or last else 200, data[begin:end], known)

    def send(self, code: int, body: bytes, headers: dict[str, str], length: int | None = None) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        if length is not None:
            self.close_connection = True


@contextmanager
def local_hub(cache: Path) -> Iterator[LocalHub]:
    """A running hub that replaces the real one inside the block, with its own cache."""
    hub = LocalHub(cache=cache)

    server = ThreadingHTTPServer(("127.0.0.1", 0), type("AnswerOfHub", (Answer,), {"hub": hub}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(constants, "ENDPOINT", hub.url)
            patch.setattr(
                constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
            )
            patch.setattr(constants, "HF_HUB_CACHE", str(cache))
            patch.setattr(constants, "HF_HUB_OFFLINE", False)
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
                patch.setenv(name, "0")
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
