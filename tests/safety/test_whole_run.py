"""One whole run with secrets in the environment, hostile names in its data, and no network."""

from __future__ import annotations

import shutil
import socket
import unicodedata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from lora_trainer.cli.main import main
from tests.recipes.recipe import QUICK, Bench, brief_verdicts, draw_images

SECRETS = {
    name: f"s3cret-{number}-value"
    for number, name in enumerate(
        "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY GITHUB_TOKEN "
        "CIVITAI_API_KEY OPENAI_API_KEY SSH_AUTH_SOCK DATABASE_URL MY_OWN_SECRET".split()
    )
}
PROXY = "http://user:s3cret-proxy@127.0.0.1:9"
CAPTION = "<script>alert(1)</script> [bold red]a ring[/] \x1b[31mred \x07 \u202eabc"
NAMES = ("-rf.png", "two\nlines.png", "\x1b[31mred.png", "[red]mark[bold].png", "<img src=x onerror=alert(1)>.png")


@pytest.fixture(scope="module")
def ran(sound_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, str]:
    """A finished run and all of its output."""
    folder = tmp_path_factory.mktemp("whole")
    data = draw_images(folder / "people" / "images of Ann")
    for image, name in zip(sorted(data.glob("*.png")), NAMES, strict=False):
        image.with_suffix(".txt").unlink()
        image.rename(data / name)
        (data / name).with_suffix(".txt").write_text(CAPTION, encoding="utf-8")
    shutil.copytree(sound_model, folder / "model")
    bench = Bench(folder / "model", data, folder / "runs", folder / "cache")
    calls: list[str] = []

    def refuse(*arguments: Any, **_: Any) -> NoReturn:
        calls.append(repr(arguments))
        raise OSError("no network here")

    with brief_verdicts(), pytest.MonkeyPatch.context() as patch, pytest.MonkeyPatch.context() as heard:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "https_proxy"):
            patch.setenv(name, PROXY)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            patch.delenv(name, raising=False)
        for name in ("connect", "connect_ex", "sendto", "bind", "listen"):
            patch.setattr(socket.socket, name, refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        patch.setattr(socket, "create_connection", refuse)
        patch.setenv("LORA_TRAINER_CACHE", str(folder / "cache"))
        messages = _heard(heard)
        code = bench.run(
            "own",
            "--offline",
            steps=2,
            checkpoint__every_n_steps=1,
            validation__every_n_steps=1,
            gates__lora_check="lite",
        )
        text = "".join(messages)
    assert code == 0, text
    assert calls == []
    return bench, text


def _heard(patch: pytest.MonkeyPatch) -> list[str]:
    import io
    import sys

    messages: list[str] = []

    class Ear(io.StringIO):
        def write(self, text: str) -> int:
            messages.append(text)
            return len(text)

    patch.setattr(sys, "stdout", Ear())
    patch.setattr(sys, "stderr", Ear())
    return messages


def written(bench: Bench) -> dict[Path, bytes]:
    return {
        path: path.read_bytes() for root in (bench.output, bench.cache) for path in root.rglob("*") if path.is_file()
    }


def test_no_secret_of_the_environment_is_written(ran: tuple[Bench, str]) -> None:
    bench, said = ran
    files = written(bench)
    assert len(files) > 10
    for path, content in files.items():
        assert b"s3cret" not in content, path
    assert "s3cret" not in said


def test_output_has_no_terminal_control_characters(ran: tuple[Bench, str]) -> None:
    _, said = ran
    hostile = {each for each in said if unicodedata.category(each) in ("Cc", "Cf") and each not in "\n\r\t"}
    assert hostile == set()


def test_a_shared_lora_has_no_path_machine_name_or_user_name(ran: tuple[Bench, str]) -> None:
    bench, _ = ran
    private = [str(Path.home()), str(bench.output), str(bench.data), "images of Ann", "people", socket.gethostname()]
    for path in bench.folder("own").glob("*.safetensors"):
        content = path.read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], "little")].decode("utf-8")
        for word in private:
            assert word not in header, (path.name, word)
        assert "onerror" not in header


def test_no_page_executes_names_or_captions(ran: tuple[Bench, str]) -> None:
    bench, _ = ran
    pages = list(bench.folder("own").glob("*.html"))
    assert pages
    checked = bench.output.parent / "check.html"
    main(["check", str(bench.data), "--html", str(checked)])
    for page in (*pages, checked):
        text = page.read_text(encoding="utf-8")
        assert "<script>alert" not in text
        assert "<img src=x" not in text
        assert "\x1b" not in text
        assert "\u202e" not in text


@pytest.mark.slow
def test_no_secret_is_written_by_a_batch(sound_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    draw_images(tmp_path / "root" / "one", 6)
    bench = Bench(sound_model, tmp_path / "root", tmp_path / "out", tmp_path / "cache")
    settings = {
        **QUICK,
        "cache.dir": str(bench.cache),
        "gates.dataset": "0",
        "gates.lora": "0",
        "gates.lora_check": "lite",
    }
    arguments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    places = ["--model", str(sound_model), "--output", str(bench.output), "--max-steps", "1"]
    assert main(["batch", str(bench.data), *places, *arguments]) == 0
    files = written(bench)
    assert bench.output / "batch.json" in files
    assert [path for path, content in files.items() if b"s3cret" in content] == []
