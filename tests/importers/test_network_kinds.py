"""Other trainers' kinds of networks, their ranks and alphas, and what a model predicts, as settings of this program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.config.schema import Config
from lora_trainer.importers.imported import Imported
from tests.importers.test_meanings import imported_text, kohya_with, one_trainer, verdict_of


def lora_of(config: Config) -> tuple[str, int, float | None]:
    return config.lora.type, config.lora.rank, config.lora.alpha


def kohya_network(folder: Path, module: str, *arguments: str, alpha: float = 4) -> Imported:
    return kohya_with(folder, f"network_module = {module!r}\nnetwork_alpha = {alpha}\nnetwork_args = {list(arguments)}")


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("networks.lora", (), ("lora", 8, 4.0)),
        ("networks.loha", (), ("loha", 8, 4.0)),
        ("networks.lokr", (), ("lokr", 8, 4.0)),
        ("lycoris.kohya", (), ("lora", 8, 4.0)),
        ("lycoris.kohya", ("algo=locon", "dora_wd=True"), ("dora", 8, 4.0)),
        ("lycoris.kohya", ("algo=lora", "dora_wd=False"), ("lora", 8, 4.0)),
        ("lycoris.kohya", ("algo=loha",), ("loha", 8, 4.0)),
        ("lycoris.kohya", ("algo=loha", "dora_wd=True"), ("loha", 8, 4.0)),
        ("lycoris.kohya", ("algo=lokr", "full_matrix=True"), ("lokr", 4096, None)),
        ("lycoris.kohya", ("algo=diag-oft",), ("oft", 8, None)),
        ("lycoris.kohya", ("algo=glora",), ("lora", 8, 4.0)),
    ],
)
def test_kinds_of_kohya(
    module: str, arguments: tuple[str, ...], expected: tuple[str, int, float | None], tmp_path: Path
) -> None:
    assert lora_of(kohya_network(tmp_path, module, *arguments).config) == expected


@pytest.mark.parametrize(
    ("arguments", "key", "verdict", "why"),
    [
        (("algo=full",), "network_module", "changed", "whole changes of weights are not trained"),
        (("algo=ia3",), "network_module", "changed", "a plain LoRA is trained in its place"),
        (("algo=boft",), "network_module", "changed", "several rotations"),
        (("algo=loha",), "network_module", "mapped", ""),
        (("algo=lokr", "unbalanced_factorization=True"), "network_args.unbalanced_factorization", "changed", "longer"),
        (("algo=lokr", "factor=9000"), "network_args.factor", "changed", "skipped"),
        (("algo=loha", "factor=8"), "network_args.factor", "ignored", "this kind"),
        (("algo=lokr", "decompose_both=True"), "network_args.decompose_both", "changed", "w1 is always whole"),
        (("algo=lokr", "dora_wd=True"), "network_args.dora_wd", "changed", "only a LoRA learns magnitudes"),
        (("algo=lora", "dora_wd=True", "wd_on_output=False"), "network_args.wd_on_output", "changed", "each input"),
        (("algo=lokr",), "network_alpha", "changed", "whole count no alpha"),
        (("algo=lokr", "full_matrix=True"), "network_alpha", "ignored", "whole factors"),
        (("algo=diag-oft",), "network_alpha", "ignored", "no alpha"),
        (("algo=diag-oft", "constraint=0.01"), "network_args.constraint", "changed", "bound"),
    ],
)
def test_what_a_network_of_lycoris_has_that_is_not_here(
    arguments: tuple[str, ...], key: str, verdict: str, why: str, tmp_path: Path
) -> None:
    found, reason = verdict_of(kohya_network(tmp_path, "lycoris.kohya", *arguments), key)
    assert found == verdict
    assert why in reason


def test_a_rank_in_quotes_makes_a_lokr_whole_as_a_number_does(tmp_path: Path) -> None:
    """LyCORIS counts no alpha then: here 1 / 4096 of the change would be trained."""
    network = (
        'network_module = "lycoris.kohya"\nnetwork_dim = "100000"\nnetwork_alpha = "1"\nnetwork_args = ["algo=lokr"]'
    )
    imported = imported_text(tmp_path, "k.toml", f'pretrained_model_name_or_path = "m"\n{network}\n')
    assert lora_of(imported.config) == ("lokr", 4096, None)


def test_the_whole_lokr_of_a_text_encoder_has_no_alpha_either(tmp_path: Path) -> None:
    """Here alpha over 4096 would scale it to nothing."""
    text = (
        'text_encoder_lr = 1e-5\nnetwork_alpha = 1\nnetwork_module = "lycoris.kohya"\nnetwork_args = ["algo=lokr", {}]'
    )
    whole = kohya_with(tmp_path, text.format('"full_matrix=True"')).config
    assert (whole.text_encoder.learning_rates, whole.text_encoder.lora_alpha) == ((1e-5,), None)
    assert kohya_with(tmp_path, text.format('"factor=-1"')).config.text_encoder.lora_alpha == 1.0


def test_sd_scripts_oft_counts_blocks_in_its_dim(tmp_path: Path) -> None:
    imported = kohya_network(tmp_path, "networks.oft", alpha=0.01)
    assert lora_of(imported.config) == ("oft", Config().lora.rank, None)
    assert imported.config.lora.target_modules == "attention"
    assert "number of blocks" in verdict_of(imported, "network_dim")[1]
    assert verdict_of(imported, "network_alpha")[0] == "changed"
    every = kohya_network(tmp_path, "networks.oft", "enable_all_linear=True")
    assert every.config.lora.target_modules == ("*.attentions.*",)


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("Standard", {}, ("lora", 8, 4.0)),
        ("Standard", {"dora_wd": True}, ("dora", 8, 4.0)),
        ("LyCORIS/LoHa", {}, ("loha", 8, 4.0)),
        ("LyCORIS/LoKr", {"factor": 8}, ("lokr", 8, 4.0)),
        ("LyCORIS/Diag-OFT", {}, ("oft", 8, None)),
        ("LyCORIS/GLoRA", {}, ("lora", 8, 4.0)),
    ],
)
def test_kinds_of_the_gui(
    kind: str, more: dict[str, object], expected: tuple[str, int, float | None], tmp_path: Path
) -> None:
    form = {"LoRA_type": kind, "max_resolution": "512,512", "network_dim": 8, "network_alpha": 4, **more}
    imported = imported_text(tmp_path, "g.json", json.dumps({"pretrained_model_name_or_path": "m", **form}))
    assert lora_of(imported.config) == expected
    assert imported.config.lora.lokr_factor == more.get("factor", -1)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"peft_type": "LORA", "lora_decompose": False}, ("lora", 8, 4.0)),
        ({"peft_type": "LORA", "lora_decompose": True}, ("dora", 8, 4.0)),
        ({"peft_type": "LOHA", "lora_decompose": True}, ("loha", 8, 4.0)),
        ({"peft_type": "OFT_2"}, ("oft", 32, None)),
        ({"peft_type": "OFT_2", "oft_block_size": 64}, ("oft", 64, None)),
        ({"peft_type": "LOKR", "lokr_dim": 6}, ("lokr", 6, 4.0)),
        ({"peft_type": "LOKR", "lokr_dim": 6, "lokr_full_matrix": True}, ("lokr", 4096, None)),
    ],
)
def test_kinds_of_onetrainer(keys: dict[str, object], expected: tuple[str, int, float | None], tmp_path: Path) -> None:
    assert lora_of(one_trainer(tmp_path, lora_rank=8, lora_alpha=4.0, **keys).config) == expected


@pytest.mark.parametrize("factor", [-1, 8])
def test_the_factor_of_a_lokr_is_lycoris_factor_and_only_a_lokr_has_one(factor: int, tmp_path: Path) -> None:
    arguments = ("algo=lokr", f"factor={factor}")
    of_kohya = kohya_network(tmp_path, "lycoris.kohya", *arguments)
    assert verdict_of(of_kohya, "network_args.factor") == ("mapped", "")
    of_onetrainer = one_trainer(tmp_path, peft_type="LOKR", lokr_dim=6, lokr_decompose_factor=factor)
    assert of_kohya.config.lora.lokr_factor == of_onetrainer.config.lora.lokr_factor == factor
    others = (
        kohya_network(tmp_path, "lycoris.kohya", "algo=loha", f"factor={factor}"),
        one_trainer(tmp_path, peft_type="LOHA", lokr_decompose_factor=factor),
    )
    for imported, key in zip(others, ("network_args.factor", "lokr_decompose_factor"), strict=True):
        assert verdict_of(imported, key)[0] == "ignored"
        assert "lora.lokr_factor" not in imported.settings


@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_patterns_and_lora_plus_are_imported_for_the_kinds_that_follow_them(kind: str, tmp_path: Path) -> None:
    algorithm = {"lora": ("algo=locon",), "dora": ("algo=locon", "dora_wd=True"), "oft": ("algo=diag-oft",)}
    sizes = ("conv_dim=2", "conv_alpha=1", "loraplus_lr_ratio=4")
    lora = kohya_network(tmp_path, "lycoris.kohya", *algorithm.get(kind, (f"algo={kind}",)), *sizes).config.lora
    assert lora.type == kind
    ignored = ADAPTERS[kind].ignores
    assert set(lora.rank_pattern.values()) == {2}
    assert set(lora.alpha_pattern.values()) == (set() if "alpha_pattern" in ignored else {1.0})
    assert lora.loraplus_lr_ratio == (None if "loraplus_lr_ratio" in ignored else 4.0)


def test_the_axis_of_onetrainers_dora_is_reported(tmp_path: Path) -> None:
    key = "lora_decompose_output_axis"
    verdict, why = verdict_of(one_trainer(tmp_path, lora_decompose=True), key)  # its default
    assert verdict == "changed"
    assert "of each output here, of each input there" in why
    assert verdict_of(one_trainer(tmp_path, lora_decompose=True, **{key: True}), key)[0] == "ignored"
    assert "inputs are rotated there" in verdict_of(one_trainer(tmp_path, peft_type="OFT_2"), "peft_type")[1]


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ({"type": "lora", "linear": 8, "linear_alpha": 4}, ("lora", 8, 4.0)),
        ({"type": "lokr", "linear": 8, "linear_alpha": 4}, ("lokr", 4096, None)),  # lokr_full_rank is on by default
        ({"type": "lokr", "linear": 8, "linear_alpha": 4, "lokr_full_rank": False}, ("lokr", 8, 4.0)),
        ({"type": "lokr", "lokr_full_rank": True, "lokr_factor": 8}, ("lokr", 4096, None)),
    ],
)
def test_kinds_of_ai_toolkit(
    network: dict[str, object], expected: tuple[str, int, float | None], tmp_path: Path
) -> None:
    process = {"type": "sd_trainer", "network": network, "model": {"name_or_path": "m", "arch": "flux2_klein_4b"}}
    job = {"job": "extension", "config": {"name": "a", "process": [process]}}
    imported = imported_text(tmp_path, "a.json", json.dumps(job))
    assert lora_of(imported.config) == expected
    assert imported.config.lora.lokr_factor == network.get("lokr_factor", -1)


def tuner(folder: Path, **keys: object) -> Imported:
    start = {"model_family": "flux", "model_type": "lora", "lora_rank": 8, "lora_alpha": 4}
    return imported_text(folder, "config.json", json.dumps({**start, **keys}))


def test_kinds_of_simpletuner(tmp_path: Path) -> None:
    assert lora_of(tuner(tmp_path).config) == ("lora", 8, 4.0)
    assert lora_of(tuner(tmp_path, lora_type="standard", use_dora=True).config) == ("dora", 8, 4.0)
    network = {"algo": "lokr", "multiplier": 1.0, "linear_dim": 10000, "linear_alpha": 1, "factor": 10}
    (tmp_path / "lycoris.json").write_text(json.dumps(network), encoding="utf-8")
    imported = tuner(tmp_path, lora_type="lycoris", lycoris_config="lycoris.json")
    assert lora_of(imported.config) == ("lokr", 4096, None)
    assert imported.config.lora.target_modules == "attention+ff"
    assert verdict_of(imported, "lora_rank") == ("ignored", "lycoris_config rules")
    assert imported.config.lora.lokr_factor == 10
    of_low_rank = {**network, "linear_dim": 16, "linear_alpha": 8, "algo": "loha"}
    assert lora_of(tuner(tmp_path, lora_type="lycoris", lycoris_config=of_low_rank).config) == ("loha", 16, 8.0)
    missing = tuner(tmp_path, lora_type="lycoris", lycoris_config="nowhere.json")
    assert missing.config.lora.type == "lora"
    assert verdict_of(missing, "lycoris_config")[0] == "changed"


def test_dora_of_diffusers(tmp_path: Path) -> None:
    command = "accelerate launch train_dreambooth_lora_sdxl.py --instance_data_dir=p --rank=8 --use_dora\n"
    assert imported_text(tmp_path, "d.sh", command).config.lora.type == "dora"


def test_what_a_model_predicts_is_set_for_checkpoints(tmp_path: Path) -> None:
    def kohya(model: str, text: str) -> Imported:
        return imported_text(
            tmp_path,
            "k.toml",
            f'pretrained_model_name_or_path = "{model}"\nnetwork_dim = 8\nv_parameterization = {text}\n',
        )

    velocity = kohya("noob.safetensors", "true\nzero_terminal_snr = true").config
    assert (velocity.model.prediction_type, velocity.noise.zero_terminal_snr) == ("v_prediction", True)
    assert kohya("noob.safetensors", "false").config.model.prediction_type is None
    of_folder = kohya("noob", "true")
    assert of_folder.config.model.prediction_type is None
    assert "scheduler_config.json" in verdict_of(of_folder, "v_parameterization")[1]
    assert kohya("flux.safetensors", 'true\nae = "ae.safetensors"').config.model.prediction_type is None
    start = {"training_method": "LORA", "concepts": [{"path": "p"}], "base_model_name": "noob.safetensors"}
    trainer = {**start, "force_v_prediction": True, "rescale_noise_scheduler_to_zero_terminal_snr": True}
    config = imported_text(tmp_path, "o.json", json.dumps(trainer)).config
    assert (config.model.prediction_type, config.noise.zero_terminal_snr) == ("v_prediction", True)
    trainer = {**start, "force_epsilon_prediction": True, "force_v_prediction": False}
    assert imported_text(tmp_path, "o.json", json.dumps(trainer)).config.model.prediction_type == "epsilon"
