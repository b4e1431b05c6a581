"""A local hub that answers fetch requests over real sockets."""

from __future__ import annotations

import hashlib
import json
import threading
import time
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
    """`repositories` has the files of each id. `status` is sent for paths with its key, `once` for the next requests of them.

    `cut` truncates the next answers for a file, each to its number of bytes. Files in `xet` lie in Xet storage, which this
    server speaks too.
    """

    url: str = ""
    cache: Path = Path()
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    status: dict[str, tuple[int, str]] = field(default_factory=dict)
    once: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    xet: dict[str, str] = field(default_factory=dict)  # by file: its id there, 64 hexadecimal digits
    xet_data: dict[str, bytes] = field(default_factory=dict)  # in place of what is true
    listing: dict[str, Any] = field(default_factory=dict)  # in place of what is true
    ranged: bool = True  # whether range ends, and ranges of checkpoints, are respected
    resumes: bool = True  # whether a range without an end is respected
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
        if refusal := self.refusal_of(path):
            return self.send(refusal[0], b"", refusal[1])
        if path.startswith(("/api/xet-token", "/v1/", "/v2/", "/xorb/")):
            return self.answer_of_xet(path)
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
        if not (self.hub.ranged if last else self.hub.resumes):
            first = last = ""
        begin, end = int(first or 0), int(last or len(data) - 1) + 1
        known = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'} | self.hub.headers
        if file in self.hub.xet:
            known |= {"X-Xet-Hash": self.hub.xet[file], "X-Xet-Refresh-Route": f"{self.hub.url}/api/xet-token"}
        if begin or last:
            known["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        if self.command == "GET" and self.hub.cut.get(file):
            stop = self.hub.cut[file].pop(0)
            return self.send(206 if begin else 200, data[begin:stop], known, length=end - begin)
        return self.send(206 if begin or last else 200, data[begin:end], known)

    def refusal_of(self, path: str) -> tuple[int, dict[str, str]] | None:
        """The status and the headers with which a path is refused, this time or always."""
        for part, answers in self.hub.once.items():
            if part in path and answers:
                return answers.pop(0)
        for part, (code, error) in self.hub.status.items():
            if part in path:
                return code, {"X-Error-Code": error} if error else {}
        return None

    def answer_of_xet(self, path: str) -> None:
        """A token, how a file is built of chunks, and the chunks: each file is one chunk of one xorb, not compressed."""
        if path == "/api/xet-token":
            expires = str(int(time.time()) + 3600)
            token = {"X-Xet-Cas-Url": self.hub.url, "X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": expires}
            return self.send(200, b"{}", token)
        name = path.rpartition("/")[2]
        file = next((file for file, number in self.hub.xet.items() if number == name), None)
        if file is None or path.startswith("/v2/"):
            return self.send(404, b"", {})
        data = self.hub.xet_data.get(file) or next(
            files[file] for files in self.hub.repositories.values() if file in files
        )
        size = len(data).to_bytes(3, "little")
        xorb = b"\0" + size + b"\0" + size + data
        if path.startswith("/xorb/"):
            return self.send(206, xorb, {"Content-Range": f"bytes 0-{len(xorb) - 1}/{len(xorb)}"})
        chunks = {"start": 0, "end": 1}
        term = {"hash": name, "unpacked_length": len(data), "range": chunks}
        where = {"range": chunks, "url": f"{self.hub.url}/xorb/{name}", "url_range": {"start": 0, "end": len(xorb) - 1}}
        plan = {"offset_into_first_range": 0, "terms": [term], "fetch_info": {name: [where]}}
        return self.send(200, json.dumps(plan).encode(), {"Content-Type": "application/json"})

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
            patch.setenv("HF_XET_CACHE", str(cache / "xet"))
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
                patch.setenv(name, "0")
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
