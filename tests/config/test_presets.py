"""Presets: every combination resolves, order does not matter, and two of one kind are refused."""

from __future__ import annotations

import tomllib
from itertools import permutations, product
from pathlib import Path

import pytest

from lora_trainer.config.layers import Layer, file_layer, flattened, resolve
from lora_trainer.config.options import suited
from lora_trainer.config.presets import (
    BASES,
    CHOICES,
    FAMILIES,
    GOALS,
    TIERS,
    auto_layer,
    family_layers,
    preset_folder,
    preset_layers,
    presets,
    selectable,
)
from lora_trainer.config.schema import Config
from lora_trainer.config.tables import names_for
from lora_trainer.config.toml import to_toml
from lora_trainer.core.errors import UsageError
from lora_trainer.dataset_check.whole_set import check_plan
from lora_trainer.models.published import public_architecture
from lora_trainer.run.settings import settle

TIER_NAMES = ["6gb", "8gb", "10gb", "12gb", "16gb", "24gb"]
GOAL_NAMES = ["balanced", "quality", "speed"]
BASE_NAMES = ["illustrious", "noobai", "pony"]


def keys(name: str) -> set[str]:
    return {f"{section}.{key}" for section, values in presets()[name].values.items() for key in values}


def test_every_file_is_a_preset_of_its_folder() -> None:
    assert len(list(preset_folder().rglob("*.toml"))) == len(presets())
    by_kind = {kind: [name for name, preset in presets().items() if preset.kind == kind] for kind in CHOICES}
    assert by_kind == {TIERS: TIER_NAMES, GOALS: GOAL_NAMES, BASES: BASE_NAMES}
    assert {preset.family for preset in presets().values()} == {"", "sdxl"}
    families = {name for name, preset in presets().items() if preset.kind == FAMILIES}
    assert families == {*names_for("model.family"), "builtin"}
    assert all(preset.description.endswith(".") for preset in presets().values())


@pytest.mark.parametrize("name", presets())
def test_every_value_of_a_preset_has_its_evidence(name: str) -> None:
    preset = presets()[name]
    assert set(preset.evidence) == keys(name)
    for clause in preset.evidence.values():
        kind, _, what = clause.partition(": ")
        assert kind in ("measured", "published", "untested")
        assert 10 < len(what) < 170, "one clause"
        assert "|" not in what, "it is a cell of a table"
        assert "\n" not in what
        assert kind != "measured" or "docs/benchmarks.md" in what


def test_evidence_is_of_the_value_that_is_used(tmp_path: Path) -> None:
    layers = [*family_layers("sdxl", builtin=False), *preset_layers(["12gb,quality"]).layers]
    resolved = resolve([*layers, Layer("--set", {"optimizer": {"learning_rate": 1e-4}})])
    assert resolved.evidence["lr_scheduler.name"] == presets()["quality"].evidence["lr_scheduler.name"]
    assert resolved.evidence["sample.guidance_scale"].startswith("published: ")
    assert not resolved.evidence["optimizer.learning_rate"]
    assert "lora.dropout" not in resolved.evidence
    prodigy = resolve([*layers, Layer("--set", {"optimizer": {"name": "prodigy"}})])
    assert not prodigy.evidence["optimizer.learning_rate"], "the preset's value gave way"
    flow = suited(resolve(layers), "flow")
    assert not flow.evidence["loss.min_snr_gamma"]
    layer, _ = auto_layer(None)
    assert resolve([layer]).evidence["lora.rank"] == presets()["12gb"].evidence["lora.rank"]


@pytest.mark.parametrize(("kind", "name"), [("goals", "quality"), ("bases/sdxl", "pony")])
def test_a_copy_of_a_preset_is_a_config_file(kind: str, name: str, tmp_path: Path) -> None:
    copy = tmp_path / "mine.toml"
    copy.write_text((preset_folder() / kind / f"{name}.toml").read_text("utf-8"), encoding="utf-8")
    resolved = resolve([file_layer("--config mine.toml", copy)])
    assert resolved.config == resolve(preset_layers([name]).layers).config
    copy.write_text("evidence = 3\n[lora]\nrank = 8\n", encoding="utf-8")
    assert resolve([file_layer("--config mine.toml", copy)]).config.lora.rank == 8


def test_every_combination_resolves_and_order_changes_nothing() -> None:
    for builtin in (True, False):
        family = family_layers("sd15", builtin=builtin)
        alone = [[name] for name in selectable()]
        pairs = list(product(TIER_NAMES, GOAL_NAMES))
        assert (len(alone), len(pairs)) == (12, 18)
        for names in alone:
            resolve([*family, *preset_layers(names).layers])
        for tier, goal in pairs:
            one = resolve([*family, *preset_layers([tier, goal]).layers])
            other = resolve([*family, *preset_layers([f"{goal},{tier}"]).layers])
            assert one == other


@pytest.mark.parametrize("family", names_for("model.family"))
def test_every_combination_suits_every_family(family: str) -> None:
    """Of a flow and of a model that predicts velocity, the goals' min-SNR weighting is left out and named; of a flow the noise too."""
    prediction = public_architecture(family).facts.prediction
    for names in [[goal] for goal in GOAL_NAMES] + [list(pair) for pair in product(TIER_NAMES, GOAL_NAMES)]:
        resolved = resolve([*family_layers(family, builtin=False), *preset_layers(names).layers])
        suits = suited(resolved, prediction)
        before, after = flattened(resolved.config), flattened(suits.config)
        lost = {name for name, value in before.items() if after[name] != value}
        weighted = set() if names[-1] == "speed" or prediction == "epsilon" else {"loss.min_snr_gamma"}
        noisy = {"noise.multires_iterations"} if names[-1] == "quality" and prediction == "flow" else set()
        assert lost == weighted | noisy
        assert len(suits.notes) == len(resolved.notes) + len(lost)


@pytest.mark.parametrize("base", BASE_NAMES)
def test_a_base_preset_combines_with_all_others_in_any_order(base: str) -> None:
    family = family_layers("sdxl", builtin=False)
    for tier, goal in product(TIER_NAMES, GOAL_NAMES):
        found = [resolve([*family, *preset_layers(names).layers]) for names in permutations([tier, goal, base])]
        assert all(each == found[0] for each in found)
        without = flattened(resolve([*family, *preset_layers([tier, goal]).layers]).config)
        own = {name for name, value in flattened(found[0].config).items() if without[name] != value}
        assert {"captions.shuffle", "captions.keep_tokens", "sample.prompt_prefix"} <= own <= keys(base)


def test_zero_terminal_snr_of_a_preset_is_for_models_that_predict_velocity() -> None:
    resolved = resolve([*family_layers("sdxl", builtin=False), *preset_layers(["noobai,12gb"]).layers])
    assert suited(resolved, "v_prediction").config.noise.zero_terminal_snr
    plain = suited(resolved, "epsilon")
    assert not plain.config.noise.zero_terminal_snr
    assert any("noise.zero_terminal_snr" in note for note in plain.notes)


def test_a_base_preset_is_for_models_of_its_family() -> None:
    own = settle(preset_layers(["pony", "8gb"]).layers, [Layer("--set", {"model": {"family": "sdxl"}})])
    assert own.config.sample.prompt_prefix.startswith("score_9")
    for family in ({}, {"family": "flux"}):
        with pytest.raises(UsageError, match=r"pony is for models of the family sdxl, and this one is of (sd15|flux)"):
            settle(preset_layers(["pony"]).layers, [Layer("--set", {"model": family})])


def test_no_setting_is_in_presets_of_two_kinds() -> None:
    limits = set().union(*map(keys, TIER_NAMES))
    wishes = set().union(*map(keys, GOAL_NAMES))
    of_bases = set().union(*map(keys, BASE_NAMES))
    assert len(limits | wishes | of_bases) == len(limits) + len(wishes) + len(of_bases)
    for names, expected in ((TIER_NAMES, limits), (GOAL_NAMES, wishes)):
        assert all(keys(name) == expected for name in names), "a preset leaves to chance what its siblings set"


def test_no_preset_chooses_prodigy() -> None:
    names = {preset.values.get("optimizer", {}).get("name") for preset in presets().values()}
    assert names == {None, "adamw", "adamw8bit"}


def changed(*names: str) -> dict[str, object]:
    config = flattened(resolve(preset_layers(names).layers).config)
    default = flattened(Config())
    return {name: value for name, value in config.items() if value != default[name]}


def test_golden_6gb_speed() -> None:
    assert changed("6gb", "speed") == {
        "data.resolution_ceiling": 768,
        "memory.limit_gib": 6.0,
        "hardware.attention_backend": "xformers",
        "compile.enabled": "auto",
        "train.total_repeats": 60,
    }


def test_golden_16gb_balanced() -> None:
    assert changed("balanced", "16gb") == {
        "data.resolution_ceiling": 1024,
        "lora.rank": 128,
        "train.effective_batch_size": 4,
        "memory.limit_gib": 16.0,
        "hardware.attention_backend": "sdpa",
        "optimizer.name": "adamw8bit",
        "loss.min_snr_gamma": 5.0,
    }


RANKS = {"6gb": 32, "8gb": 32, "10gb": 64, "12gb": 64, "16gb": 128, "24gb": 128}


@pytest.mark.parametrize("family", [*names_for("model.family"), "builtin"])
def test_the_rank_is_that_of_the_tier(family: str) -> None:
    """Also of the built-in model, whose own preset is below. What `presets show` prints of a tier is what is trained."""
    below = family_layers("sd15" if family == "builtin" else family, builtin=family == "builtin")
    for tier in TIER_NAMES:
        chosen = preset_layers([tier]).layers
        resolved = resolve([*below, *chosen])
        assert (resolved.config.lora.rank, resolved.origin["lora.rank"]) == (RANKS[tier], f"preset {tier}")
        assert resolve(chosen).config.lora == resolved.config.lora or family == "builtin", "which trains other layers"
        assert not any("lora." in note for note in resolved.notes)
    assert resolve(below).config.lora.rank == (64 if family == "builtin" else 32)


def test_the_dataset_check_names_the_rank_of_the_largest_tiers_for_few_images() -> None:
    for tier, rank in RANKS.items():
        codes = [[each.code for each in check_plan(images, 100.0, rank)] for images in (5, 31, 32)]
        few = ["large_rank"] if tier in ("16gb", "24gb") else []
        assert codes == [few, few, []]


def test_your_own_rank_wins_over_that_of_a_tier() -> None:
    tier = preset_layers(["24gb"]).layers
    own = Layer("--set", {"lora": {"rank": 8}})
    resolved = resolve([*tier, own])
    assert (resolved.config.lora.rank, resolved.origin["lora.rank"], resolved.notes) == (8, "--set", ())


def test_a_ceiling_lowers_a_rank_that_is_not_your_own() -> None:
    ceiling = Layer("a.toml", {"lora": {"max_rank": 16}})
    for below in ([], preset_layers(["24gb"]).layers, family_layers("sd15", builtin=True)):
        resolved = resolve([*below, ceiling])
        assert (resolved.config.lora.rank, resolved.origin["lora.rank"]) == (16, "a.toml (lora.max_rank)")
        again = resolve([*below, Layer("config.toml", tomllib.loads(to_toml(resolved.config)))])
        assert (again.config, again.notes) == (resolved.config, ())
    with pytest.raises(UsageError, match=r"lora\.max_rank = 16 .*lora\.rank = 128"):
        resolve([Layer("--set", {"lora": {"rank": 128}}), ceiling])


def test_the_builtin_model_learns_faster_than_its_family() -> None:
    rates = [
        resolve(family_layers("sd15", builtin=builtin)).config.optimizer.learning_rate for builtin in (True, False)
    ]
    assert rates[0] > rates[1]


@pytest.mark.parametrize(
    ("names", "message", "fix"),
    [
        (["12bg"], "There is no preset named 12bg.", "Did you mean 12gb"),
        (["qualty,12gb"], "There is no preset named qualty.", "Did you mean quality?"),
        (["6gb", "8gb"], "--preset names 2 VRAM presets: 6gb and 8gb.", "Keep one"),
        (["auto", "8gb"], "--preset names 2 VRAM presets: auto and 8gb.", "Keep one"),
        (["speed,quality"], "--preset names 2 training presets: speed and quality.", "Keep one"),
        (["pony,illustrious"], "--preset names 2 base presets: pony and illustrious.", "Keep one"),
        (["sd15"], "There is no preset named sd15.", "Known: "),
    ],
)
def test_names_that_cannot_be_used(names: list[str], message: str, fix: str) -> None:
    (problem,) = preset_layers(names).problems
    assert problem.message == message
    assert fix in problem.fix


def test_a_duplicate_name_counts_once() -> None:
    assert preset_layers(["12gb", "12gb, speed,"]) == preset_layers(["12gb,speed"])


@pytest.mark.parametrize(
    ("gib", "tier"),
    [
        (3.9, "6gb"),
        (5.8, "6gb"),
        (7.6, "8gb"),
        (9.7, "10gb"),
        (10.91, "10gb"),  # 11 GB
        (11.76, "12gb"),
        (14.58, "16gb"),  # T4
        (15.7, "16gb"),
        (19.6, "16gb"),
        (21.98, "24gb"),  # A10
        (23.6, "24gb"),
    ],
)
def test_auto_takes_the_vram_preset_of_the_gpu(gib: float, tier: str) -> None:
    layer, note = auto_layer(gib)
    assert layer.values == presets()[tier].values
    assert tier in layer.name
    assert tier in note


@pytest.mark.parametrize(("gib", "tier"), [(31.4, "24gb"), (79.1, "24gb"), (None, "12gb")])
def test_auto_without_a_matching_vram_preset_sets_no_limit(gib: float | None, tier: str) -> None:
    layer, note = auto_layer(gib)
    config = resolve([layer]).config
    assert config.memory.limit_gib is None
    assert config.lora.rank == presets()[tier].values["lora"]["rank"]
    assert "without its memory limit" in note
