"""Who may ask the server for what: hosts, origins, the token, bodies, headers, and paths held to allowed roots.

A browser sends requests to a server on its own machine from any page that it shows. So each request must name this
server as its host (a foreign name that resolves to this machine is refused), and each change must come from its own page
or from a program that is no browser. With `--host` of another address the token decides: pages of others do not have it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_trainer.core.errors import Problem, UserError
from lora_trainer.core.io import finite, read_json, write_json

LOOPBACK = ("localhost", "127.0.0.1", "::1")
READING = ("GET", "HEAD", "OPTIONS")
MOST_BYTES = 8_000_000  # of a body; a config has at most 4 million
# Requests whose body is a file of a dataset: it is written as it comes, within limits of its route.
WITH_FILE = (("PUT", "/api/datasets/file"), ("PUT", "/api/datasets/mask"))
COOKIE = "lora_trainer_token"
LOGIN = "/api/login"
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Refusal(UserError):
    """A request that is answered with `status` and problems."""

    def __init__(self, status: int, problems: Problem | Iterable[Problem]) -> None:
        super().__init__(problems)
        self.status = status


class JSON(Response):
    """A document; NaN and infinity become null."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        # ASCII: names of files may hold bytes that are no text.
        return json.dumps(finite(content), allow_nan=False, separators=(",", ":"), default=str).encode("ascii")


def answer_of(error: UserError) -> JSON:
    """The problems of an error, each once; 422 where it says no other status."""
    status = error.status if isinstance(error, Refusal) else 422
    problems = dict.fromkeys(error.problems)
    return JSON({"problems": [vars(each) for each in problems]}, status)


@dataclass(frozen=True)
class Token:
    """What another address than this machine must send: a secret of 32 bytes, of which a file has the salted hash."""

    salt: str
    digest: str

    def is_it(self, text: str) -> bool:
        """Whether a text is the token, compared in constant time."""
        found = hashlib.sha256((self.salt + text).encode("utf-8", "replace")).hexdigest()
        return hmac.compare_digest(found, self.digest)


def token_of(path: Path) -> tuple[Token, str | None]:
    """The token of a file, and its text if it was made now: it is shown once. Raises OSError."""
    try:
        stored = read_json(path)
        return Token(str(stored["salt"]), str(stored["sha256"])), None
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        text, salt = secrets.token_urlsafe(32), secrets.token_hex(16)
        token = Token(salt, hashlib.sha256((salt + text).encode()).hexdigest())
        write_json(path, {"salt": token.salt, "sha256": token.digest})
        os.chmod(path, 0o600)
        return token, text


class Guard:
    """Middleware around everything: refuses what is foreign, reads bodies within their limit, sets the headers of answers."""

    def __init__(self, app: ASGIApp, token: Token | None = None) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no web socket is served
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store" if scope["path"].startswith("/api") else "no-cache")
            await send(message)

        headers = Headers(scope=scope)
        try:
            refuse_foreign(scope["method"], scope["path"], headers, self.token)
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if (scope["method"], scope["path"]) in WITH_FILE:
                if kind not in ("text/plain", "application/octet-stream") and not kind.startswith("image/"):
                    fix = "Send the bytes of an image or a caption, as image/*, text/plain or application/octet-stream."
                    raise Refusal(
                        415, Problem("body_not_read", f"{kind[:100] or 'A body without a type'} is not read here.", fix)
                    )
            elif scope["method"] not in READING:
                body = await whole_body(receive, headers, kind)
                scope, receive = with_body(scope, body)
        except Refusal as refusal:
            await answer_of(refusal)(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


def refuse_foreign(method: str, path: str, headers: Headers, token: Token | None) -> None:
    """Raise Refusal for a request of another host's name, of a foreign page, or without the token."""
    host = headers.get("host", "")
    if len(headers.getlist("host")) != 1 or (token is None and name_of(host) not in LOOPBACK):
        raise Refusal(
            421, Problem("host_not_served", f"This server is not {host[:100]}.", "Open it as 127.0.0.1 or localhost.")
        )
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_page = not path.startswith(("/api", "/openapi"))
    if method in READING:
        if site not in (None, "same-origin", "none") and not is_page:
            raise Refusal(
                403, Problem("cross_origin", "Another page asked for this.", "Open it in the page of lora-trainer.")
            )
    elif site not in (None, "same-origin", "none") or (origin is not None and not is_own(origin, host)):
        raise Refusal(
            403,
            Problem("cross_origin", "A change must come from the page of lora-trainer itself.", "Use its own address."),
        )
    if token is None or is_page or path == LOGIN:
        return
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    if not token.is_it(sent.strip() if scheme.lower() == "bearer" else cookie_of(headers)):
        fix = f"Send it as `Authorization: Bearer TOKEN`, or once to {LOGIN}. `lora-trainer ui` printed it."
        raise Refusal(401, Problem("token_wrong", "The token is missing or wrong.", fix))


def name_of(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
    try:
        found = urlsplit(f"//{host}")
        return found.hostname if found.netloc == host and not found.username and found.port != 0 else None
    except ValueError:
        return None


def is_own(origin: str, host: str) -> bool:
    """Whether a page of this origin is this server's: its address is the request's own."""
    try:
        found = urlsplit(origin)
    except ValueError:
        return False
    return found.scheme in ("http", "https") and found.netloc.lower() == host.lower()


def cookie_of(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


async def whole_body(receive: Receive, headers: Headers, kind: str) -> bytes:
    """The body of a request, whose type is `kind`. Raises Refusal where it is larger than any config, or is no JSON."""
    too_large = Refusal(
        413, Problem("request_too_large", f"A request has at most {MOST_BYTES:,} bytes.", "Send a config, not data.")
    )
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MOST_BYTES:
        raise too_large
    parts, size = list[bytes](), 0
    while True:
        message = await receive()
        if message["type"] != "http.request":  # the client has left
            raise Refusal(400, Problem("request_cut_off", "The request was not complete."))
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MOST_BYTES:
            raise too_large
        if not message.get("more_body"):
            break
    body = b"".join(parts)
    if kind not in ("", "application/json") or (body and not kind):
        fix = "Send JSON, with the header Content-Type: application/json."
        raise Refusal(415, Problem("body_not_read", f"{kind[:100] or 'A body without a type'} is not read here.", fix))
    if body:
        refuse_wrong_json(body)
    return body


def refuse_wrong_json(body: bytes) -> None:
    """Raise Refusal for what is no JSON, or has numbers that JSON does not have: NaN, infinity."""

    def no_number(text: str) -> NoReturn:
        raise ValueError(f"{text} is no number of JSON")

    def number(text: str) -> float:
        return value if math.isfinite(value := float(text)) else no_number(text)

    try:
        json.loads(body.decode("utf-8"), parse_constant=no_number, parse_float=number)
    except RecursionError:
        raise Refusal(
            400, Problem("request_invalid", "The JSON is nested too deeply.", "Send plain settings.")
        ) from None
    except ValueError as error:
        raise Refusal(400, Problem("request_invalid", f"The body is not valid JSON: {error}.", "Correct it.")) from None


def with_body(scope: Scope, body: bytes) -> tuple[Scope, Receive]:
    """A request whose body was read, to be read again. Its type is JSON."""
    kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return left.pop() if left else {"type": "http.disconnect"}

    return {**scope, "headers": [*kept, (b"content-type", b"application/json")]}, receive


def allowed(path: Path | str, roots: Sequence[Path]) -> Path:
    """The real path of a file or folder, links followed. Raises Refusal where that is not inside of an allowed root."""
    try:
        real = Path(os.path.realpath(os.path.expanduser(path)))
        if any(real.is_relative_to(os.path.realpath(root)) for root in roots):
            return real
    except (OSError, ValueError):  # no path
        pass
    named = ", ".join(map(str, roots))
    fix = f"Allowed: {named}. Start the server with --root DIR to allow another folder."
    raise Refusal(
        403, Problem("outside_folders", f"{str(path)[:300]} is outside of the folders that this server may read.", fix)
    )
