"""Hub models, fetched over real sockets from a local hub."""

from __future__ import annotations

import errno
import hashlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.schema.inputs import ModelSection
from lora_trainer.core.errors import UsageError
from lora_trainer.models.weight_files import weights_of
from lora_trainer.run.bases import hub as hub_module
from lora_trainer.run.bases.find import Base, find_base
from lora_trainer.run.bases.hub_files import choose_files
from lora_trainer.run.bases.names import HubModel
from tests.run.local_hub import COMMIT, LocalHub, local_hub

NAME = "some/model"
INDEX = {
    "_class_name": "StableDiffusionPipeline",
    "safety_checker": ["x", "Checker"],
    "scheduler": ["diffusers", "PNDMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "text_encoder_2": [None, None],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}
FILES = {
    "model_index.json": json.dumps(INDEX).encode(),
    "README.md": b"read me",
    "model.ckpt": b"pickle",
    "scheduler/scheduler_config.json": b'{"of": "scheduler"}',
    "tokenizer/vocab.json": b'{"of": "tokenizer"}',
    "tokenizer/merges.txt": b"#",
    "text_encoder/config.json": b'{"of": "text_encoder"}',
    "text_encoder/model.safetensors": b"t" * 300,
    "text_encoder/pytorch_model.bin": b"pickle",
    "safety_checker/model.safetensors": b"s" * 1000,
    "unet/config.json": b'{"of": "unet"}',
    "unet/diffusion_pytorch_model.safetensors": bytes(range(256)) * 40,
    "unet/diffusion_pytorch_model.fp16.safetensors": b"half",
    "unet/diffusion_pytorch_model.non_ema.safetensors": b"other",
    "vae/config.json": b'{"of": "vae"}',
    "vae/diffusion_pytorch_model.fp16.safetensors": b"v" * 200,
}
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LocalHub]:
    with local_hub(tmp_path / "hf") as running:
        running.repositories[NAME] = dict(FILES)
        yield running


def base(
    path: str = NAME, *, weights: bool = True, offline: bool = False, messages: list[str] | None = None, **more: object
) -> Base:
    section = ModelSection.model_validate({"path": path, **more})
    return find_base(section, weights=weights, offline=offline, say=[].append if messages is None else messages.append)


def refused(path: str = NAME, **more: object) -> str:
    with pytest.raises(UsageError) as caught:
        base(path, **more)  # type: ignore[arg-type]
    assert all(problem.fix for problem in caught.value.problems)
    return str(caught.value)


def codes_of(path: str = NAME) -> list[str]:
    with pytest.raises(UsageError) as caught:
        base(path)
    assert all(problem.fix for problem in caught.value.problems)
    return [problem.code for problem in caught.value.problems]


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a download would wait for a hub."""
    waited: list[float] = []
    monkeypatch.setattr("lora_trainer.run.bases.hub_requests.sleep", waited.append)
    return waited


def test_only_needed_files_are_fetched_and_later_found_without_a_request(hub: LocalHub) -> None:
    found = base()
    fetched = set(hub.fetched())
    assert fetched == set(FILES) - {
        "README.md",
        "model.ckpt",
        "text_encoder/pytorch_model.bin",
        "safety_checker/model.safetensors",
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "unet/diffusion_pytorch_model.non_ema.safetensors",
    }
    assert {name: (found.folder / name).read_bytes() for name in fetched} == {name: FILES[name] for name in fetched}
    assert (found.commit, found.named, found.whole) == (COMMIT, NAME, True)
    hub.requests.clear()
    assert base() == found
    assert base(offline=True) == found
    assert base(revision=COMMIT) == found
    assert hub.requests == []


def test_configs_are_fetched_first_and_weights_when_needed(hub: LocalHub) -> None:
    found = base(weights=False)
    assert not found.whole
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]
    assert "text_encoder/ holds no complete set" in refused(offline=True)
    assert base(weights=False, offline=True) == found
    whole = base()
    assert (whole.folder, whole.whole) == (found.folder, True)
    assert base(weights=False).whole


def file_requests(hub: LocalHub, name: str = UNET) -> list[str]:
    """The ranges that were asked of a file."""
    return [span for how, path, span in hub.requests if how == "GET" and path.endswith(name)]


def test_a_stopped_download_resumes_at_its_last_byte(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    hub.cut[UNET] = [4000]
    with monkeypatch.context() as patch:
        patch.setattr("lora_trainer.run.bases.hub_requests.sleep", stop)
        with pytest.raises(KeyboardInterrupt):
            base()
    hub.requests.clear()
    messages: list[str] = []
    found = base(messages=messages)
    assert file_requests(hub) == ["bytes=4000-"]
    assert (found.folder / UNET).read_bytes() == FILES[UNET]
    assert any("resuming at 4 KB" in line for line in messages)


def test_a_connection_that_breaks_is_opened_again_at_the_last_byte(hub: LocalHub) -> None:
    hub.cut[UNET] = [3000, 5000, 5000, 9000]
    found = base()
    assert file_requests(hub) == ["", "bytes=3000-", "bytes=5000-", "bytes=5000-", "bytes=9000-"]
    assert (found.folder / UNET).read_bytes() == FILES[UNET]


def test_a_server_without_ranges_sends_an_interrupted_file_whole(hub: LocalHub) -> None:
    hub.resumes = False
    hub.cut[UNET] = [4000, 6000]
    found = base()
    assert file_requests(hub) == ["", "bytes=4000-", "bytes=6000-"]
    assert (found.folder / UNET).read_bytes() == FILES[UNET]


def test_a_partial_file_that_is_too_long_is_downloaded_anew(hub: LocalHub) -> None:
    blobs = hub_module.cached_repository(NAME) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(FILES[UNET]).hexdigest()}.part").write_bytes(b"x" * (len(FILES[UNET]) + 1))
    found = base()
    assert file_requests(hub) == [""]
    assert (found.folder / UNET).read_bytes() == FILES[UNET]


def test_a_connection_that_only_breaks_is_given_up(hub: LocalHub) -> None:
    hub.cut[UNET] = [3000] * 20
    assert codes_of() == ["hub_unreachable"]
    assert len(file_requests(hub)) == 6
    hub.cut.clear()
    assert base().whole


@pytest.mark.parametrize("path", ["/api/models/", f"/resolve/{COMMIT}/model_index.json", UNET])
@pytest.mark.parametrize(("code", "headers"), [(429, {"Retry-After": "7"}), (429, {}), (503, {})])
def test_a_busy_hub_is_asked_again(hub: LocalHub, waits: list[float], path: str, code: int, headers: dict) -> None:
    hub.once[path] = [(code, headers)] * 2
    assert base().whole
    assert waits == ([7.0, 7.0] if headers else [1.0, 2.0])


@pytest.mark.parametrize(("answers", "asked"), [([(429, {"Retry-After": "3600"})], 1), ([(429, {})] * 5, 5)])
def test_a_hub_that_stays_busy_ends_in_one_message(hub: LocalHub, answers: list, asked: int) -> None:
    hub.once["/api/models/"] = answers
    assert codes_of() == ["hub_limits_requests"]
    # The hub's library also asks once a process which agents it should know.
    assert sum(path.startswith("/api/models/") for _, path, _ in hub.requests) == asked


def test_bytes_that_differ_from_the_hub_digest_are_refused(hub: LocalHub) -> None:
    for etag in ("a" * 64, "a" * 40):
        hub.headers["ETag"] = f'"{etag}"'
        assert codes_of() == ["download_damaged"]
        hub.headers.clear()
    assert not list(hub.cache.rglob("*.part"))
    assert base().whole


def test_small_files_are_compared_with_git_s_digest(hub: LocalHub) -> None:
    data = b"not one"
    hub.repositories[NAME] = {"sd.safetensors": data}
    hub.headers["ETag"] = f'"{hashlib.sha1(b"blob 7" + bytes(1) + data).hexdigest()}"'
    model = HubModel(NAME, file="sd.safetensors")
    found = hub_module.find_snapshot(model, weights=True, without_t5=False, offline=False, say=print)
    assert (found.folder / "sd.safetensors").read_bytes() == data


def test_files_in_xet_storage_come_from_there(hub: LocalHub) -> None:
    hub.xet = {UNET: "ab" * 32}
    found = base()
    assert (found.folder / UNET).read_bytes() == FILES[UNET]
    assert UNET not in hub.fetched()
    assert any(path.startswith("/xorb/") for _, path, _ in hub.requests)


def test_damaged_bytes_of_xet_storage_are_replaced_by_http(hub: LocalHub) -> None:
    hub.xet = {UNET: "cd" * 32}
    hub.xet_data = {UNET: bytes(len(FILES[UNET]))}
    found = base()
    assert (found.folder / UNET).read_bytes() == FILES[UNET]
    assert file_requests(hub) == [""]


@pytest.mark.parametrize("path", ["/api/xet-token", "/v1/", "/xorb/"])
def test_where_xet_storage_fails_its_files_come_by_http(hub: LocalHub, path: str) -> None:
    hub.xet = {UNET: "ef" * 32}
    hub.status[path] = (404, "")
    found = base()
    assert (found.folder / UNET).read_bytes() == FILES[UNET]
    assert file_requests(hub) == [""]


def test_without_xet_its_files_come_by_http(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    hub.xet = {UNET: "ab" * 32}
    assert base().whole
    assert file_requests(hub) == [""]


def test_a_disk_that_fills_up_keeps_what_arrived(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("lora_trainer.run.bases.hub_requests._append", full)
        assert codes_of() == ["disk_full"]
    assert base().whole


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/resolve/", (401, "GatedRepo"), "is gated"),
        ("/api/", (403, "GatedRepo"), "is gated"),
        ("/api/", (403, ""), "refuses some/model to this user (error 403)"),
        ("/api/", (404, "RepoNotFound"), "neither a folder here nor a model of the hub"),
        ("/api/", (401, "RepoNotFound"), "neither a folder here nor a model of the hub"),
        ("/api/", (404, "RevisionNotFound"), "has no revision main"),
        ("/api/", (500, ""), "error 500"),
    ],
)
def test_a_refusal_of_the_hub_is_reported_with_the_fix(
    hub: LocalHub, path: str, status: tuple[int, str], words: str
) -> None:
    hub.status[path] = status
    assert words in refused()


def test_an_unreachable_hub(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refused()


def test_offline_makes_no_request(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "create_connection", opened)
    monkeypatch.setattr(socket.socket, "connect", opened)
    assert "offline nothing is fetched" in refused(offline=True)
    assert "offline nothing is fetched" in refused(offline=True, revision="v1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "offline nothing is fetched" in refused()


@pytest.mark.parametrize("problem", [["--frobnicate"], ["--set", "optimizer.learning_rate=20"]])
def test_a_refused_config_makes_no_request(
    hub: LocalHub, capsys: pytest.CaptureFixture[str], problem: list[str]
) -> None:
    assert main(["train", "--model", "nobody/nothing", "--name", "a", *problem]) == 2
    assert "nobody" not in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.parametrize("command", [["check", "."], ["validate", "a.safetensors"], ["sample", "a", "--prompt", "b"]])
def test_every_command_with_a_model_can_be_offline(
    hub: LocalHub, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, "--model", "nobody/nothing", "--offline"]) == 2
    assert "offline nothing is fetched" in capsys.readouterr().err
    assert hub.requests == []


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"unet/diffusion_pytorch_model.bin": b"x", "vae/diffusion_pytorch_model.bin": b"x"}, "a pickle"),
        ({UNET: None, "unet/diffusion_pytorch_model.fp16.safetensors": None}, "unet/ holds no complete set"),
        ({"tokenizer/vocab.json": None}, "tokenizer/ holds no vocabulary"),
        ({"vae/config.json": None}, "vae/config.json is missing"),
        ({"model_index.json": None}, "only model.ckpt, a pickle"),
        ({"model_index.json": None, "sd.safetensors": b"x"}, "Name one of its files: some/model/sd.safetensors"),
        ({"model_index.json": None, "adapter_config.json": b"{}"}, "holds a LoRA"),
        ({"model_index.json": b"[]"}, "is not a JSON object"),
    ],
)
def test_a_repository_without_a_base_model_is_refused_before_weights_are_fetched(
    hub: LocalHub, files: dict[str, bytes | None], words: str
) -> None:
    if any(name.endswith(".bin") for name in files):
        for name in [each for each in FILES if each.endswith(".safetensors")]:
            del hub.repositories[NAME][name]
    for name, data in files.items():
        hub.repositories[NAME].pop(name, None)
        if data is not None:
            hub.repositories[NAME][name] = data
    assert words in refused()
    assert not [name for name in hub.fetched() if name.endswith(".safetensors")]


def test_a_single_checkpoint_of_a_repository(hub: LocalHub) -> None:
    hub.repositories[NAME] = {"sd.safetensors": b"not one", "old/deep.safetensors": b"nor this"}
    assert "has no file lost.safetensors" in refused(f"{NAME}/lost.safetensors")
    found = hub_module.find_snapshot(
        HubModel(NAME, file="old/deep.safetensors"),
        weights=True,
        without_t5=False,
        offline=False,
        say=print,
    )
    assert (found.folder / "old/deep.safetensors").read_bytes() == b"nor this"
    assert hub.fetched() == ["old/deep.safetensors"]


def test_a_full_disk_is_reported_before_anything_is_fetched(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "free_bytes", lambda folder: 2000)
    assert "has 2 KB free" in refused()
    assert hub.fetched() == ["model_index.json"]


def test_a_full_disk_counts_what_has_arrived(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.cut[UNET] = [9000] * 20
    assert codes_of() == ["hub_unreachable"]
    hub.cut.clear()
    monkeypatch.setattr(hub_module, "free_bytes", lambda folder: 2000)
    assert base().whole


@pytest.mark.parametrize(
    "name", ["../../up.json", "unet/../../up.safetensors", "/etc/model.safetensors", "unet\\x.safetensors"]
)
def test_file_names_of_a_repository_cannot_leave_the_cache(hub: LocalHub, tmp_path: Path, name: str) -> None:
    hub.repositories[NAME][name] = b"hostile"
    base()
    assert name not in hub.fetched()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.read_bytes() == b"hostile"]


@pytest.mark.parametrize(
    "listing",
    [
        {"sha": "../../../outside"},
        {"sha": None},
        {"siblings": [{"rfilename": "model_index.json", "size": -1}]},
        {"siblings": "none"},
        {"siblings": [{"rfilename": "model_index.json", "size": 10**12}]},
    ],
)
def test_malformed_responses_are_refused(hub: LocalHub, listing: dict[str, object]) -> None:
    hub.listing = listing
    refused()
    assert hub.fetched() == []


@pytest.mark.parametrize("headers", [{"ETag": '"../../out"'}, {"X-Repo-Commit": "../../out"}])
def test_redirecting_headers_are_refused(hub: LocalHub, tmp_path: Path, headers: dict[str, str]) -> None:
    hub.headers = headers
    refused()
    assert not list(tmp_path.rglob("out*"))


@pytest.mark.parametrize(
    "path", ["lost", "./some/model", "some/model.safetensors", "C:\\some\\model", "some/model/part"]
)
def test_a_path_is_never_requested_from_the_hub(hub: LocalHub, path: str) -> None:
    assert "There is no model at" in refused(path)
    assert hub.requests == []


def test_an_existing_folder_of_the_owner_makes_an_id_a_mistyped_path(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "the folder some exists" in refused()
    assert hub.requests == []


def test_a_url_is_answered_with_its_id(hub: LocalHub) -> None:
    assert "Name the model as some/model." in refused(f"https://huggingface.co/{NAME}/tree/main")


@pytest.mark.parametrize("revision", ["../main", "a b", "-x", "x/../../y"])
def test_an_invalid_revision(hub: LocalHub, revision: str) -> None:
    assert "is no branch, tag or commit" in refused(revision=revision)
    assert hub.requests == []


def test_which_weights_are_chosen() -> None:
    half = {"model.fp16.safetensors"}
    shards = {f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    index = {"model.safetensors.index.json"}
    assert weights_of({*half, "model.safetensors"}) == ["model.safetensors"]
    assert weights_of(half | shards | index) == [*index, *sorted(shards)]
    assert weights_of(half | shards) == [*half]
    assert weights_of({*shards - {"model-00001-of-00002.safetensors"}, *index}) == []
    sharded = {
        f"diffusion_pytorch_model{each}.safetensors" for each in (".fp16-00001-of-00002", "-00002-of-00002.fp16")
    }
    assert len(weights_of({*sharded, "diffusion_pytorch_model.safetensors.index.fp16.json"})) == 3
    assert weights_of({"model.non_ema.safetensors", "sd.safetensors", "model.bin"}) == []


def test_without_t5_its_weights_are_skipped() -> None:
    index = {"text_encoder_3": ["transformers", "T5EncoderModel"], "tokenizer_3": ["transformers", "T5TokenizerFast"]}
    assert choose_files((), index, weights=True, without_t5=True).lacking == ()
    assert len(choose_files((), index, weights=True, without_t5=False).lacking) == 3
    there = ("text_encoder_3/config.json", "text_encoder_3/model.safetensors", "tokenizer_3/spiece.model")
    chosen = choose_files(there, index, weights=True, without_t5=True)
    assert chosen.names == ("text_encoder_3/config.json", "tokenizer_3/spiece.model", "model_index.json")
    assert set(choose_files(there, index, weights=True, without_t5=False).names) == {*there, "model_index.json"}


def test_an_edit_model_needs_the_settings_of_its_image_processor() -> None:
    index = {"processor": ["transformers", "Qwen2VLProcessor"], "tokenizer": ["transformers", "Qwen2Tokenizer"]}
    there = ("processor/preprocessor_config.json", "processor/vocab.json", "tokenizer/tokenizer.json")
    chosen = choose_files(there, index, weights=True, without_t5=False)
    assert chosen.small == (there[0], there[2], "model_index.json")
    lacking = choose_files((), index, weights=True, without_t5=False).lacking
    assert lacking == (f"{there[0]} is missing", "tokenizer/ holds no vocabulary")


def test_a_model_without_a_tokenizer_s_folder_has_its_vocabulary_beside_the_settings_for_images() -> None:
    index = {"processor": ["transformers", "Qwen3VLProcessor"]}
    there = ("processor/preprocessor_config.json", "processor/tokenizer.json")
    chosen = choose_files(there, index, weights=True, without_t5=False)
    assert chosen.small == (*there, "model_index.json")
    lacking = choose_files(there[:1], index, weights=True, without_t5=False).lacking
    assert lacking == ("processor/ holds no vocabulary",)


@pytest.mark.parametrize("commit", ["../../../elsewhere", "", "main"])
def test_a_cache_that_links_elsewhere_is_not_followed(hub: LocalHub, tmp_path: Path, commit: str) -> None:
    base()
    (tmp_path / "hf/models--some--model/refs/main").write_text(commit)
    assert "is not in the Hugging Face cache" in refused(offline=True)
    assert base().commit == COMMIT
