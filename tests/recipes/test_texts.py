"""Runs with other caption encoding settings than the model's defaults."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.core.errors import UsageError
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import read_lora
from lora_trainer.models.quantization import layers
from lora_trainer.run.inputs import read_model
from lora_trainer.run.reading import read_as_trained, text_options
from tests.lora_format.tiny import tiny_pipeline
from tests.recipes.recipe import Bench, record, tensor_bytes


def header(file: Path) -> dict[str, str]:
    return dict(read_tensor_header(file)[METADATA])


def test_long_captions_train_and_the_file_records_how_they_were_encoded(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = replace(bench, cache=bench.output / "own_cache")  # others hold captions of 77 states
    assert bench.run("long", steps=2, text_encoder__max_tokens=150) == 0
    texts = [path for path in bench.cache.rglob("*.safetensors") if "texts" in str(path)]
    with safe_open(texts[0], framework="pt") as shard:
        assert {shard.get_slice(name).get_shape()[-2] for name in shard.keys() if "embeds" in name} == {154}  # noqa: SIM118
    file = bench.folder("long") / "long.safetensors"
    assert header(file)["ss_max_token_length"] == "150"
    capsys.readouterr()
    assert bench.run("long", "--resume", steps=3, text_encoder__max_tokens=75) == 2
    printed = capsys.readouterr().err
    assert "text_encoder.max_tokens was 150 and is now 75" in printed
    assert "text encoder differs" not in printed


def test_captions_are_encoded_as_in_training_unless_set_otherwise() -> None:
    plain, family = Config(), FAMILIES["sd15"]
    run = Config.model_validate(
        {
            "text_encoder": {"clip_skip": 2, "max_tokens": 225},
            "textual_inversion": {"placeholder_tokens": ["<zobo>"]},
        }
    )
    own = {"lora_trainer.version": "1", "ss_clip_skip": "2", "ss_max_token_length": "225"}
    for config in (read_as_trained(plain, run, {}), read_as_trained(plain, None, own)):
        assert text_options(config, family) == text_options(run, family)
        assert not config.textual_inversion.placeholder_tokens
    assert (
        read_as_trained(plain, None, {"ss_clip_skip": "2"}) == plain
    )  # of another program, which may ignore this setting
    set_config = Config.model_validate({"text_encoder": {"clip_skip": 3}})
    assert read_as_trained(set_config, run, own) == set_config


def test_new_tokens_are_learned_bundled_and_used_in_samples(bench: Bench) -> None:
    words = {
        "textual_inversion__placeholder_tokens": '["<zobo>"]',
        "textual_inversion__num_vectors": 2,
        "captions__trigger_word": "<zobo>",
    }
    drawn = {"sample__prompts": '["a [trigger] on a blue background"]', "gates__lora_check": "lite"}
    assert bench.run("words", steps=3, textual_inversion__learning_rate=0.1, **words, **drawn) == 0
    folder, files = bench.folder("words"), record(bench.folder("words"))["files"]
    assert files["embedding-zobo"] == "words.embedding-zobo.safetensors"
    own = tensor_bytes(folder / files["embedding-zobo"])
    bundled = tensor_bytes(folder / files["kohya"])
    assert list(own) == ["emb_params"]
    assert bundled["bundle_emb.<zobo>.string_to_param.*"] == own["emb_params"]
    assert not any("emb" in key for key in tensor_bytes(folder / files["diffusers"]))
    assert header(folder / files["kohya"])["modelspec.trigger_phrase"] == "<zobo>"
    assert read_lora(folder / files["kohya"]).embeddings["<zobo>.string_to_param.*"].shape == (2, 32)
    again = folder / "samples" / "before_after.json"
    assert "a <zobo> on a blue background" in again.read_text(encoding="utf-8")
    assert record(folder)["lora"]["parts"]["works"]["value"] == 1.0


def test_a_token_that_no_caption_has_gets_no_file_and_the_summary_tells_why(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "textual_inversion__placeholder_tokens": '["<zobo>", "<RING>"]',
        "captions__trigger_word": "<ring>",
        "textual_inversion__learning_rate": 0.1,
    }
    assert bench.run("lacking", steps=1, **words) == 0
    folder, output = bench.folder("lacking"), capsys.readouterr().out
    assert "The token '<zobo>' is untrained" in output
    assert "The token '<RING>'" not in output
    assert [path.name for path in folder.glob("*embedding*")] == ["lacking.embedding-RING.safetensors"]
    assert "embedding-zobo" not in record(folder)["files"]
    assert "untrained_word" in [finding["code"] for finding in record(folder)["lora"]["findings"]]


def test_unused_and_invalid_tokens_are_reported(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(
        [
            "check",
            str(bench.data),
            "--model",
            str(bench.model),
            "--set",
            'textual_inversion.placeholder_tokens=["<zobo>"]',
        ]
    ) in (0, 3)
    assert "No caption contains the learned token" in capsys.readouterr().out
    for tokens, expected in (
        ('["a b"]', "without spaces"),
        ('["<zo>", "<ZO>"]', "twice"),
        ('["sks"]', "Write <sks>"),
        ('["<sks"]', "Write <sks>"),
    ):
        assert bench.run("wrong", textual_inversion__placeholder_tokens=tokens) == 2
        assert expected in capsys.readouterr().err
    for setting in (
        {"textual_inversion__initializer_token": "ring"},
        {"textual_inversion__num_vectors": 3},
        {"textual_inversion__learning_rate": 0.1},
    ):
        assert bench.run("wrong", **setting) == 2
        assert "Set textual_inversion.placeholder_tokens" in capsys.readouterr().err
    assert (
        bench.run("wrong", textual_inversion__placeholder_tokens='["<zo>"]', textual_inversion__initializer_token='""')
        == 2
    )
    assert "textual_inversion.initializer_token" in capsys.readouterr().err


def test_all_settings_that_a_model_refuses_are_reported_at_once(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"text_encoder__clip_skip": 9, "flow__shift": 3, "text_encoder__learning_rates": "[1e-4, 1e-4, 1e-4]"}
    assert bench.run("wrong", **settings) == 2
    output = capsys.readouterr().err
    assert all(name in output for name in ("text_encoder.clip_skip", "flow.shift", "text_encoder.learning_rates"))
    assert "3 problems" in output


def test_a_skipped_t5_is_never_loaded(tmp_path: Path) -> None:
    """It need not exist: training, evaluation and sampling run without T5."""
    tiny_pipeline(tmp_path / "tokens", "sd3").save_pretrained(tmp_path / "sd3", safe_serialization=True)
    shutil.rmtree(tmp_path / "sd3" / "text_encoder_3")
    config = Config.model_validate({"model": {"path": str(tmp_path / "sd3"), "without_t5": True}})
    family, facts = read_model(config)
    assert facts.caption_tokens == 77
    pipeline = family.pipeline.make(facts.path, torch.float32, torch.device("cpu"))
    assert pipeline.text_encoder_3 is None
    embeds = family.load_encoders(facts.path, torch.float32, torch.device("cpu")).encode_text(["a ring"])["embeds"]
    assert embeds.shape[1] == 77 + 256
    assert not embeds[:, 77:].any()
    with pytest.raises(UsageError, match="text_encoder_3"):
        read_model(Config.model_validate({"model": {"path": str(tmp_path / "sd3")}}))


def test_tokens_that_the_tokenizer_has_are_refused_before_weights_are_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*args: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(layers, "fill_layers", read)
    words = {"textual_inversion__placeholder_tokens": '["<zobo>", "!", "#"]', "captions__trigger_word": "<zobo>"}
    assert bench.run("known", steps=3, **words) == 2
    output = " ".join(capsys.readouterr().err.split())
    assert "'!' is already a token of the model" in output
    assert "'#' is already a token" in output
    assert not bench.folder("known").exists()
