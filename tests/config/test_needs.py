"""A setting that does nothing with the others: refused from the user, dropped from a preset, kept where it acts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.api import ProductionTrainer
from lora_trainer.config.contradictions import Settings, idle
from lora_trainer.config.layers import Layer, Resolved, flattened, resolve
from lora_trainer.config.needs import EXAMPLES, how_to_use, needs_in_words, needs_of, settings_with_needs, unmet
from lora_trainer.config.options import suited
from lora_trainer.config.presets import GOALS, TIERS, family_layers, preset_layers, presets
from lora_trainer.config.schema.types import EMPTY, NOT_0, ON, READS
from lora_trainer.config.tables import names_for, names_that_read
from lora_trainer.config.toml import setting_names
from lora_trainer.core.errors import UsageError
from lora_trainer.data.sources.names import SETTINGS_FILE
from lora_trainer.jobs.folders import Shared, job_settings
from lora_trainer.jobs.job_document import make_job, read_settings
from lora_trainer.optim.optimizers import OPTIMIZERS

# A value other than the default for each setting that needs another one.
VALUES: dict[str, Any] = {
    "data.class_prompts": ("a cat",),
    "data.crop_variants": 8,
    "captions.separator": ";",
    "captions.keep_tokens": 2,
    "captions.variants": 4,
    "text_encoder.lora_rank": 8,
    "text_encoder.lora_alpha": 8.0,
    "textual_inversion.num_vectors": 2,
    "textual_inversion.initializer_token": "robot",
    "textual_inversion.learning_rate": 2e-3,
    "lora.loraplus_text_encoder_lr_ratio": 4.0,
    "lora.timestep_rank_exponent": 2.0,
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.99,
    "optimizer.gradient_noise_decay": 0.3,
    "lr_scheduler.cycles": 5,
    "lr_scheduler.power": 3.0,
    "lr_scheduler.cycle_momentum": True,
    "lr_scheduler.base_momentum": 0.8,
    "lr_scheduler.max_momentum": 0.9,
    "noise.multires_discount": 0.5,
    "flow.logit_mean": 0.5,
    "flow.logit_std": 2.0,
    "flow.mode_scale": 0.5,
    "loss.huber_delta": 0.2,
    "loss.min_snr_gamma": 5.0,
    "loss.output_preservation_every_n_steps": 3,
    "loss.output_preservation_class": "a person",
    "loss.output_preservation_prompts": ("a cat",),
    "loss.prior_loss_weight": 0.5,
    "loss.unmasked_weight": 0.1,
    "train.swa_every_n_steps": 5,
    "train.swa_learning_rate": 1e-5,
    "safeguards.max_nonfinite_steps": 3,
    "safeguards.reduce_lr_on_plateau": True,
    "safeguards.plateau_window": 5,
    "safeguards.plateau_spread": 0.01,
    "safeguards.plateau_factor": 0.3,
    "safeguards.loss_spike_ratio": 2.0,
    "safeguards.loss_spike_clip": 0.3,
    "safeguards.loss_spike_lr": 0.3,
    "safeguards.early_stopping": True,
    "safeguards.early_stopping_metric": "agreement",
    "safeguards.patience": 3,
    "safeguards.min_delta": 0.01,
    "memory.checkpointing_mode": "selective",
    "memory.int8_matmul": True,
    "compile.mode": "reduce-overhead",
    "compile.dynamic": True,
    "compile.fullgraph": True,
    "compile.min_steps": 300,
    "checkpoint.export_keep_last": 3,
    "checkpoint.keep_best": 1,
    "checkpoint.scratch_limit_gb": 1.0,
    "validation.every_n_steps": 50,
    "validation.agreement": False,
    "validation.split_seed": 7,
    "sample.count": 4,
    "profile.wait": 3,
    "profile.warmup": 3,
    "profile.active": 3,
    "profile.repeat": 2,
    "profile.details": True,
    "run.tracker_project": "cats",
    "run.log_artifacts": False,
    "run.tracker_wait_seconds": 5.0,
    "run.command_seconds": 5.0,
}
# Values that turn the needed settings on, and others off.
ON_BY: dict[str, Any] = {
    "captions.shuffle": True,
    "captions.tag_dropout": 0.1,
    "captions.wildcards": True,
    "captions.trigger_word": "sks",
    "captions.keep_tokens_separator": "|||",
    "checkpoint.export_every_n_epochs": 1,
    "checkpoint.export_every_n_steps": 10,
    "checkpoint.scratch": "/dev/shm",
    "compile.enabled": True,
    "data.num_class_images": 8,
    "loss.output_preservation_weight": 1.0,
    "lora.timestep_min_rank": 4,
    "lr_scheduler.cycle_momentum": True,
    "memory.gradient_checkpointing": True,
    "noise.multires_iterations": 4,
    "optimizer.gradient_noise": 0.01,
    "profile.enabled": True,
    "run.on_failure": "true",
    "run.on_finish": "true",
    "run.trackers": ("tensorboard",),
    "safeguards.clip_on_loss_spike": True,
    "safeguards.early_stopping": True,
    "safeguards.reduce_lr_on_plateau": True,
    "source.is_reg": True,
    "source.masks": "alpha",
    "text_encoder.learning_rates": (1e-5,),
    "textual_inversion.placeholder_tokens": ("<zobo>",),
    "train.swa_start": 0.75,
    "validation.every_n_steps": 100,
}
OFF_BY: dict[str, Any] = {
    "optimizer.name": "adafactor",
    "lr_scheduler.name": "linear",
    "run.trackers": (),
    "memory.gradient_checkpointing": False,
    "flow.timestep_sampling": "uniform",
    "loss.weighting": "debiased",
    "safeguards.on_nonfinite": "stop",
    "validation.every_n_steps": 0,
    "validation.split": 0.0,
    "sample.prompts": ("a cat",),
}
# What a met need needs itself.
WITH = {"lr_scheduler.cycle_momentum": {"lr_scheduler.name": "one_cycle"}}


def layer(name: str, values: dict[str, Any]) -> Layer:
    """A layer of settings by `section.key`; `source.key` is that of one source."""
    nested: dict[str, dict[str, Any]] = {}
    for setting, value in values.items():
        section, _, key = setting.partition(".")
        if section == "source":
            nested.setdefault("data", {})["sources"] = ({"path": "images", key: value},)
        else:
            nested.setdefault(section, {})[key] = value
    return Layer(name, nested)


def met(name: str, other: str) -> dict[str, Any]:
    """Settings with which `other` lets `name` act."""
    wanted = needs_of(name)[other]
    if isinstance(wanted, tuple):
        value: Any = wanted[0]
    elif wanted == READS:
        value = names_that_read(other, name)[0]
        value = (value,) if other == "run.trackers" else value
    else:
        value = {ON: ON_BY.get(other), NOT_0: 0.1, EMPTY: ()}[wanted]
    return {**WITH.get(other, {}), other: value}


def others(name: str) -> list[str]:
    return [other for other in needs_of(name) if other != name]


def off(name: str) -> dict[str, Any]:
    return {other: OFF_BY[other] for other in others(name) if other in OFF_BY}


CASES = [(name, other) for name in settings_with_needs() for other in others(name)]


def test_every_need_is_checked() -> None:
    assert set(VALUES) == set(settings_with_needs())
    known = {*setting_names(), "source.is_reg", "source.masks"}
    assert {other for _, other in CASES} <= known
    assert all(needs_in_words(name) for name in VALUES)


@pytest.mark.parametrize("name", settings_with_needs())
def test_from_the_user_a_setting_that_does_nothing_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve([layer("--set", {**off(name), name: VALUES[name]})])
    (problem,) = [each for each in caught.value.problems if each.message.startswith(f"{name} = ")]
    assert problem.fix
    assert " to ," not in problem.fix
    assert " to or" not in problem.fix


@pytest.mark.parametrize(("name", "other"), CASES)
def test_what_a_met_need_lacks_is_named_by_values(name: str, other: str) -> None:
    """`other` is as it must be, but does nothing itself."""
    deeper = {each: OFF_BY[each] for each in needs_of(other) if each in OFF_BY} if other in VALUES else {}
    values = {**off(name), **met(name, other), **deeper, name: VALUES[name]}
    settings = Settings(layer("", values).values, dict.fromkeys(setting_names(), "--set"))
    for wanted in unmet(settings, name).values():
        assert wanted not in (READS, ())
    for clash in idle(settings):
        assert " to ," not in clash.fix
        assert " to or" not in clash.fix


@pytest.mark.parametrize(("name", "other"), [case for case in CASES if case[1] in EXAMPLES])
def test_a_fix_with_an_example_works(name: str, other: str) -> None:
    fix = how_to_use({other: needs_of(name)[other]}, name)
    values = {**off(name), other: EXAMPLES[other], name: VALUES[name]}
    if needs_of(name)[other] in (ON, NOT_0):
        assert f"{other}={EXAMPLES[other]}" in fix
        assert flattened(resolve([layer("--set", values)]).config)[name] == VALUES[name]
    else:
        assert f"{other}=" not in fix


def test_prompts_are_emptied_not_set() -> None:
    assert how_to_use({"sample.prompts": EMPTY}, "sample.count").startswith("Empty sample.prompts,")


def test_base_momentum_needs_a_scheduler_that_cycles_it() -> None:
    cycled = {"lr_scheduler.name": "cosine", "lr_scheduler.cycle_momentum": True, "lr_scheduler.base_momentum": 0.8}
    with pytest.raises(UsageError) as caught:
        resolve([layer("--set", cycled)])
    assert len(caught.value.problems) == 2
    assert all("one_cycle" in each.fix for each in caught.value.problems)


@pytest.mark.parametrize("name", settings_with_needs())
def test_from_a_preset_it_is_dropped_and_named(name: str) -> None:
    usual = flattened(resolve([]).config)[name]
    resolved = resolve([layer("preset some", {name: VALUES[name]}), layer("--set", off(name))])
    assert flattened(resolved.config)[name] == usual
    assert resolved.origin[name].startswith("default")
    assert [note for note in resolved.notes if note.startswith(f"{name} = ") and "preset some" in note]


@pytest.mark.parametrize(("name", "other"), CASES)
def test_it_is_kept_where_it_acts(name: str, other: str) -> None:
    settings = {**off(name), **met(name, other), name: VALUES[name]}
    if name == "memory.checkpointing_mode":
        settings["compile.enabled"] = False
    resolved = resolve([layer("--set", settings)])
    assert flattened(resolved.config)[name] == VALUES[name]
    assert resolved.notes == ()
    assert not unmet(Settings(resolved.config.model_dump(), resolved.origin), name)


@pytest.mark.parametrize("name", settings_with_needs())
def test_the_default_is_no_problem_wherever_it_comes_from(name: str) -> None:
    """A run's own config.toml has all values."""
    usual = flattened(resolve([]).config)
    resolved = resolve([layer("--config run/config.toml", {**usual, **off(name)})])
    assert flattened(resolved.config)[name] == usual[name]


@pytest.mark.parametrize("setting", ["optimizer.name", "lr_scheduler.name", "run.trackers"])
def test_tables_read_only_settings_that_say_so(setting: str) -> None:
    """An entry that lists a misspelled setting would never be asked for it."""
    read = {name for entry in names_for(setting) for name in VALUES if entry in names_that_read(setting, name)}
    assert read == {name for name in VALUES if needs_of(name).get(setting) == READS}


def test_an_optimizer_that_reads_beta1_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one = OPTIMIZERS["adafactor"]
    monkeypatch.setitem(OPTIMIZERS, "own", type(one)(one.build, one.state, reads=("optimizer.beta1",)))
    own = {"optimizer.name": "own", "optimizer.beta1": 0.5}
    assert resolve([layer("--set", own)]).config.optimizer.beta1 == 0.5
    with pytest.raises(UsageError, match=r"optimizer\.beta2 = 0\.5"):
        resolve([layer("--set", {**own, "optimizer.beta2": 0.5})])


def test_a_preset_that_sets_both_is_dropped_as_a_whole() -> None:
    """The window needs the plateau, and that needs validation images."""
    preset = {"safeguards.reduce_lr_on_plateau": True, "safeguards.plateau_window": 5}
    resolved = resolve([layer("preset some", preset), layer("--set", {"validation.split": 0.0})])
    assert not resolved.config.safeguards.reduce_lr_on_plateau
    assert resolved.config.safeguards.plateau_window == 10
    assert len(resolved.notes) == 2


def test_what_a_model_lacks_drops_what_needs_it() -> None:
    noise = {"noise.multires_iterations": 6, "noise.multires_discount": 0.5}
    resolved = suited(resolve([layer("preset some", noise)]), "flow")
    assert (resolved.config.noise.multires_iterations, resolved.config.noise.multires_discount) == (0, 0.3)
    assert again(resolved).notes == ()


def test_sources_count() -> None:
    sources = ({"path": "a", "crop": "random"}, "b")
    resolved = resolve([layer("--set", {"data.crop_variants": 8, "data.sources": sources})])
    assert resolved.config.data.crop_variants == 8
    with pytest.raises(UsageError, match=r"crop_variants"):
        resolve([layer("--set", {"data.crop_variants": 8, "data.sources": ("a", {"path": "b", "crop": "center"})})])
    own = {"path": "a", "captions": {"keep_tokens": 2}}
    with pytest.raises(UsageError, match=r"data\.sources\[0\]\.captions\.keep_tokens = 2"):
        resolve([layer("--set", {"captions.shuffle": True, "data.sources": (own,)})])


def test_a_search_and_a_dataset_file_drop_it() -> None:
    for name in ("search", "trial 3", "bench"):
        user = layer("--set", {"run.tracker_wait_seconds": 5.0})
        assert resolve([user, layer(name, {"run.trackers": ()})]).config.run.tracker_wait_seconds == 60.0
        trial = resolve([layer("trial 3", {"lr_scheduler.power": 3.0})])
        assert trial.config.lr_scheduler.power == 2.0
    (note,) = resolve([layer("/images/data.toml", {"captions.keep_tokens": 2})]).notes
    assert note.startswith("captions.keep_tokens = 2 ")


def test_a_flag_may_leave_a_file_without_effect() -> None:
    """A run's config.toml, repeated with another LR scheduler."""
    file = layer("--config runs/a/config.toml", {"lr_scheduler.name": "polynomial", "lr_scheduler.power": 3.0})
    resolved = resolve([file, layer("--set", {"lr_scheduler.name": "cosine"})])
    assert resolved.config.lr_scheduler.power == 2.0
    assert len(resolved.notes) == 1
    for wrong in (
        layer("--config a.toml", {"lr_scheduler.power": 3.0}),
        layer("accelerate", {"compile.mode": "max-autotune"}),
    ):
        with pytest.raises(UsageError):
            resolve([wrong])
    compiled = layer("accelerate", {"compile.enabled": True, "compile.mode": "max-autotune"})
    assert resolve([compiled, layer("--set", {"compile.enabled": False})]).config.compile.mode == "default"


def test_a_folders_file_may_leave_flags_without_effect() -> None:
    flags = layer("--set", {"lr_scheduler.name": "polynomial", "lr_scheduler.power": 3.0})
    resolved = resolve([flags, layer("lora.toml", {"lr_scheduler.name": "cosine"})])
    assert resolved.config.lr_scheduler.power == 2.0
    assert len(resolved.notes) == 1
    with pytest.raises(UsageError):
        resolve([layer("--set", {"lr_scheduler.name": "cosine"}), layer("lora.toml", {"lr_scheduler.power": 3.0})])


FILES = ("cat.toml", "bench_cat.toml", "search-a.toml", "trial 1.toml", "preset_cat.toml", "default.toml", "lora.toml")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["Python", "batch", "saved preset"])
def test_the_name_of_a_file_says_nothing_about_its_settings(name: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / name

    def settled(own: dict[str, dict[str, Any]]) -> Resolved:
        if kind == "saved preset":
            user = [Layer(f"saved preset {name}", tomllib.loads(file.read_text("utf-8"))), Layer("page", own)]
            return resolve(user)
        if kind == "Python":
            return ProductionTrainer(config=file, settings=own, quiet=True).resolved
        return job_settings(Shared((), (Layer("--set", own),)), file.stem, file)

    file.write_text('lr_scheduler = { name = "polynomial", power = 3.0 }', "utf-8")
    assert settled({}).config.lr_scheduler.power == 3.0
    resolved = settled({"lr_scheduler": {"name": "cosine"}})
    assert resolved.config.lr_scheduler.power == 2.0
    assert [note for note in resolved.notes if note.startswith("lr_scheduler.power = ")]
    file.write_text('lr_scheduler = { name = "cosine", power = 3.0 }', "utf-8")
    with pytest.raises(UsageError, match=r"lr_scheduler\.power = 3"):
        settled({})


def test_a_file_in_a_batchs_folder_is_above_its_flags(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text('lr_scheduler = { name = "cosine" }', "utf-8")
    shared = Shared((), (layer("--set", {"lr_scheduler.name": "polynomial", "lr_scheduler.power": 3.0}),))
    resolved = job_settings(shared, "cat", tmp_path)
    assert (resolved.config.lr_scheduler.name, resolved.config.lr_scheduler.power) == ("cosine", 2.0)
    assert [note for note in resolved.notes if note.startswith("lr_scheduler.power = ")]
    assert read_settings(make_job(shared, "cat", tmp_path).document).notes == resolved.notes


def again(resolved: Resolved) -> Resolved:
    """The same run from its config.toml."""
    return resolve([Layer("--config config.toml", resolved.config.model_dump())])


@pytest.mark.parametrize("family", ["sd15", "sdxl", "flux", "z_image"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "flow"])
def test_a_run_of_any_presets_repeats_from_its_config(family: str, prediction: str) -> None:
    tiers = [name for name, each in presets().items() if each.kind == TIERS]
    goals = [name for name, each in presets().items() if each.kind == GOALS]
    for names in [*tiers, *(f"{tiers[0]},{goal}" for goal in goals)]:
        layers = [*family_layers(family, builtin=family == "sd15"), *preset_layers([names]).layers]
        resolved = suited(resolve(layers), prediction)
        repeated = suited(again(resolved), prediction)
        assert repeated.config == resolved.config
        assert repeated.notes == ()
