"""Who the server answers: ten hostile requests for each page, the token, and paths outside of the allowed roots."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from lora_trainer.core.errors import Problem
from lora_trainer.web.asked_settings import refuse_outside
from lora_trainer.web.safety import COOKIE, MOST_BYTES, Refusal, allowed, is_own, name_of, token_of
from lora_trainer.web.served_files import inside
from tests.conftest import needs_links
from tests.web.site import ADDRESS, app_of, problems_of, site, write_run

READ = (
    *("/api/runs", "/api/runs/cat", "/api/settings", "/api/queue", "/api/machine", "/api/doctor", "/openapi.json"),
    *("/api/loras", "/api/datasets"),
)
CHANGE = (
    *("/api/runs", "/api/runs/cat/resume", "/api/runs/cat/stop", "/api/runs/cat/requests", "/api/plan", "/api/import"),
    *("/api/presets", "/api/queue", "/api/queue/work", "/api/queue/cat/cancel", "/api/doctor"),
    *("/api/loras/tools", "/api/loras/sheets", "/api/loras/folders"),
    *("/api/datasets/captions", "/api/datasets/edit", "/api/datasets/copy", "/api/datasets/caption"),
)
OURS = {"origin": ADDRESS, "sec-fetch-site": "same-origin"}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "runs"
    write_run(folder / "cat", steps=2)
    (folder.parent / "secret").write_text("SECRET", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def client(output: Path) -> TestClient:
    return site(output)


def state_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("path", READ)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),  # a name that resolves to this machine
        ({"host": "127.0.0.1.evil.example:7860"}, 421),
        ({"host": "evil.example@127.0.0.1"}, 421),
        ({"host": ""}, 421),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),  # another port of this machine
    ],
)
def test_foreign_pages_read_nothing(client: TestClient, path: str, headers: dict[str, str], status: int) -> None:
    answer = client.get(path, headers=headers)
    assert answer.status_code == status
    assert problems_of(answer.json())


@pytest.mark.parametrize("path", CHANGE)
@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({"origin": "http://evil.example"}, "{}", 403),
        ({"origin": "http://127.0.0.1:8000"}, "{}", 403),
        ({"origin": "null"}, "{}", 403),
        ({"sec-fetch-site": "cross-site"}, "{}", 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, "{}", 421),
        ({"content-type": "text/plain"}, "{}", 415),  # a form of another page needs no permission for it
        ({"content-type": "application/x-www-form-urlencoded"}, "a=1", 415),
        ({}, '{"settings": {"lora.rank": NaN}}', 400),
        ({}, "{not json", 400),
        ({}, '{"a":' * 100_000, 400),
        ({}, '{"settings": {"x": 1e999}}', 400),
        ({"content-length": str(MOST_BYTES + 1)}, "{}", 413),
        ({}, '{"surprise": 1}', 422),
    ],
)
def test_hostile_changes_are_refused_and_change_nothing(
    client: TestClient, output: Path, path: str, headers: dict[str, str], body: str, status: int
) -> None:
    before = state_of(output)
    answer = client.post(path, content=body, headers={"content-type": "application/json", **OURS, **headers})
    if status == 422 and path.endswith(("stop", "cancel", "work")):
        assert answer.status_code in (409, 422)  # they read no body, or there is nothing to change
    else:
        assert answer.status_code == status
    assert problems_of(answer.json())
    assert state_of(output) == before


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "TRACE"])
def test_methods_are_what_they_are(client: TestClient, output: Path, method: str) -> None:
    """No header or field makes a GET or POST another method."""
    before = state_of(output)
    assert client.request(method, "/api/runs", headers=OURS).status_code == 405
    override = {**OURS, "x-http-method-override": "DELETE"}
    assert client.get("/api/runs/cat?_method=DELETE", headers=override).status_code == 200
    assert state_of(output) == before


@pytest.mark.parametrize(
    "path",
    [
        "/api/runs/cat/files/..%2f..%2fsecret",
        "/api/runs/cat/files/%2e%2e/%2e%2e/secret",
        "/api/runs/cat/files//etc/passwd",
        "/api/runs/cat/files/%00",
        "/api/runs/cat/files/.lock",
        "/api/runs/..~cat",
        "/api/runs/%2e%2e",
        "/api/runs/~etc",
        "/../pyproject.toml",
        "/%2e%2e/safety.py",
        "/..%5csafety.py",
    ],
)
def test_no_path_leads_out(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (400, 404)
    assert "root:" not in answer.text
    assert "SECRET" not in answer.text
    assert "def " not in answer.text


@pytest.mark.parametrize("name", ["../../secret", "samples/../../../secret", "/etc/passwd", "..", "", "a\\b", "\0"])
def test_no_name_leads_out_of_a_folder(output: Path, name: str) -> None:
    """As it comes, where no client has shortened it."""
    with pytest.raises(Refusal):
        inside(output / "cat", name)


@needs_links
def test_real_paths_count(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    os.symlink(outside, inside / "link")
    os.symlink(inside, tmp_path / "root")
    assert allowed(tmp_path / "root", [inside]) == inside
    for wrong in (inside / "link", inside / ".." / "out", f"{inside}x", "\0", "~nobody-here/x"):
        with pytest.raises(Refusal) as refused:
            allowed(wrong, [inside])
        assert refused.value.status == 403
    client = site(tmp_path / "runs", inside)
    assert client.get(f"/api/browse?path={inside}").status_code == 200
    assert client.get(f"/api/browse?path={inside}/link").status_code == 403
    assert "link" not in client.get(f"/api/browse?path={inside}").text
    sent: dict[str, Any] = {"data": [str(inside / "link")], "settings": {"lora.network_weights": str(outside / "x")}}
    assert len(problems_of(client.post("/api/plan", json=sent).json())) == 2


def test_auto_names_no_scratch_folder(tmp_path: Path) -> None:
    for text, refused in (("auto", 0), (str(tmp_path / "out"), 1)):
        problems: list[Problem] = []
        refuse_outside([{"checkpoint": {"scratch": text}}], [tmp_path / "in"], problems)
        assert len(problems) == refused


def test_headers_keep_foreign_content_out(client: TestClient) -> None:
    for path in ("/", "/api/runs", "/nothing", "/api/runs/nothing"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
        assert "access-control-allow-origin" not in headers
    assert client.get("/api/runs").headers["cache-control"] == "no-store"


def test_another_address_asks_for_the_token(tmp_path: Path) -> None:
    path = tmp_path / ".ui" / "token"
    token, text = token_of(path)
    assert text is not None
    assert text not in path.read_text("utf-8")  # a salted hash
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token_of(path) == (token, None)
    client = site(tmp_path, token=token)
    client.base_url = client.base_url.copy_with(host="192.168.1.5")
    assert client.get("/").status_code == 200  # the page that asks for it
    assert client.get("/api/runs").status_code == 401
    assert client.get("/api/runs", headers={"authorization": f"Bearer {text[:-1]}"}).status_code == 401
    assert client.get("/api/runs", headers={"authorization": f"Bearer {text}"}).status_code == 200
    assert client.post("/api/login", json={"token": "wrong"}).status_code == 401
    cookie = client.post("/api/login", json={"token": text}).headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert client.get("/api/runs").status_code == 200
    assert client.post("/api/plan", json={}, headers={"origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    ("host", "name"),
    [("localhost:7860", "localhost"), ("[::1]:7860", "::1"), ("a@b", None), ("127.0.0.1/x", None), ("[", None)],
)
def test_names_of_hosts(host: str, name: str | None) -> None:
    assert name_of(host) == name
    assert is_own(f"http://{host}", host) == (name is not None or host in ("a@b",))


def test_the_server_loads_no_torch(checkout: Path, tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom starlette.testclient import TestClient\n"
        "from lora_trainer.web.app import make_app\nfrom lora_trainer.web.server_state import ServerOptions\n"
        "client = TestClient(make_app(ServerOptions(Path(sys.argv[1]))), base_url='http://localhost')\n"
        "paths = ('runs', 'settings', 'queue', 'machine', 'browse', 'datasets')\n"
        "assert all(client.get('/api/' + path).status_code == 200 for path in paths)\n"
        "print([name for name in ('torch', 'diffusers', 'transformers', 'peft') if name in sys.modules])\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=checkout, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
    assert not (tmp_path / ".ui").exists()  # reading writes nothing


def test_every_route_is_described(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    assert document["info"]["title"] == "lora-trainer"
    described = {(method.upper(), path) for path, of in document["paths"].items() for method in of}
    routes = {("GET", path) for path in READ[:1]} | {("POST", path) for path in ("/api/runs", "/api/plan")}
    assert routes <= described
    assert all(of.get("description") for path in document["paths"].values() for of in path.values())
    assert app_of(client).docs_url is None
