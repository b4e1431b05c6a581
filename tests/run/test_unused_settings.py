"""Settings that do nothing for a reason that is not among the settings, and the command's exit code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.main import main
from lora_trainer.config.layers import Layer, resolve
from lora_trainer.core.errors import UsageError
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Family
from lora_trainer.run.settings import refuse_guidance, refuse_unchecked

DEAD = ("optimizer.beta1=0.5", "optimizer.beta2=0.9", "lr_scheduler.power=3", "loss.prior_loss_weight=0.5")


def test_the_command_names_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("optimizer.name=adafactor", "lr_scheduler.name=cosine", *DEAD, f"run.output={tmp_path}")
    assert main(["train", *(word for setting in settings for word in ("--set", setting))]) == 2
    shown = capsys.readouterr().err
    assert all(setting.partition("=")[0] in shown for setting in DEAD)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value"), [("compare", "strengths"), ("encoder", "facebook/dinov2-base"), ("unresolved", "accept")]
)
def test_a_check_that_is_off_compares_nothing(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=rf"gates\.{name} "):
        refuse_unchecked(resolve([Layer("--set", {"gates": {"lora_check": "off", name: value}})]))
    own = Layer("--set", {"gates": {name: value}})
    for layers in ([own], [own, Layer("search", {"gates": {"lora_check": "off"}})]):
        refuse_unchecked(resolve(layers))


def test_all_settings_of_a_check_that_is_off_are_named() -> None:
    dead = {"compare": "strengths", "encoder": "facebook/dinov2-base", "unresolved": "accept"}
    off = Layer("--set", {"gates": {"lora_check": "off"}})
    with pytest.raises(UsageError) as caught:
        refuse_unchecked(resolve([Layer("--set", {"gates": dead}), off]))
    assert all(f"gates.{key}" in caught.value.problems[0].message for key in dead)
    for below in ("--config a.toml", "preset some"):
        refuse_unchecked(resolve([Layer(below, {"gates": dead}), off]))


def unguided(family: Family) -> Family:
    def defaults(folder: Path) -> object:
        return replace(family.pipeline.sampling_defaults(folder), guided=False)

    return replace(family, pipeline=replace(family.pipeline, sampling_defaults=defaults))  # type: ignore[arg-type]


def test_a_model_without_guidance_takes_no_scale() -> None:
    family = FAMILIES["sd15"]
    facts = family.read_facts(BASE_FOLDER)

    def scale(value: float, origin: str = "--set"):  # type: ignore[no-untyped-def]
        return resolve([Layer(origin, {"sample": {"guidance_scale": value}})])

    with pytest.raises(UsageError, match=r"sample\.guidance_scale is 5"):
        refuse_guidance(scale(5.0), unguided(family), facts)
    for fine in (scale(1.0), scale(0.0), scale(7.5), scale(5.0, "family preset sd15")):
        refuse_guidance(fine, unguided(family), facts)
    refuse_guidance(scale(5.0), family, facts)
