"""What a card without bf16 units makes of the settings: fp16 in place of bf16, also under weights in 8 bits."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.layers import Layer, resolve
from lora_trainer.config.presets import preset_layers
from lora_trainer.config.schema import Config
from lora_trainer.models import FAMILIES
from lora_trainer.models.family import public_architecture
from lora_trainer.models.storage import four_bits
from lora_trainer.production import choices
from lora_trainer.production.choices import Choices, choose
from lora_trainer.production.memory import CONTEXT_GIB, GIB, LARGEST_SHARE, usable_gib
from lora_trainer.production.plans.plan import make_plan


@pytest.fixture
def old_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(choices, "cuda_memory_gib", lambda: 5.8)


def chosen(family: str, *user: Layer, tier: str = "6gb") -> Choices:
    resolved = resolve([*preset_layers([tier]).layers, *user])
    return choose(resolved, FAMILIES[family], public_architecture(family), torch.device("cuda"), 1)


@pytest.mark.parametrize(("family", "precision"), [("sd15", "fp16"), ("sdxl", "fp8")])
def test_an_old_card_computes_in_fp16_and_its_own_config_repeats_that(
    family: str, precision: str, old_card: None
) -> None:
    first = chosen(family)
    assert (first.precision.value, first.dtype) == (precision, torch.float16)
    # As a run's config.toml has it: what was decided counts as asked for.
    again = chosen(family, Layer("--config", {"memory": {"base_precision": precision}}))
    assert (again.precision.value, again.dtype) == (precision, torch.float16)
    assert (again.micro, again.checkpointing) == (first.micro, first.checkpointing)


@pytest.mark.parametrize(("works", "precision"), [(True, "nf4"), (False, "fp8")])
def test_a_run_and_a_plan_for_its_card_agree_on_what_nf4_needs(works, precision, monkeypatch):
    """A library that is there and does not start is as good as none. Nobody tries it where nf4 would not be chosen."""
    monkeypatch.setattr(choices, "cuda_memory_gib", lambda: 11.8)
    tried = []

    def importing(name: str, *given: object) -> object:
        if name != "bitsandbytes":
            return import_module(name, *given)
        tried.append(name)
        if not works:
            raise OSError("libcudart.so.11.0: cannot open shared object file")
        return None

    monkeypatch.setattr(four_bits.importlib, "import_module", importing)
    found = chosen("flux", tier="12gb")
    resolved = resolve([*preset_layers(["12gb"]).layers, Layer("--set", {"model": {"family": "flux"}})])
    assert (found.precision.value, make_plan(resolved, here=True).fit.precision) == (precision, precision)
    elsewhere = make_plan(resolved)
    assert elsewhere.fit.precision == "nf4"
    assert "pip install bitsandbytes" in elsewhere.advice[0]
    del tried[:]
    chosen("sdxl", tier="12gb")
    assert not tried


@given(st.one_of(st.none(), st.floats(1.0, 48.0)), st.floats(2.0, 48.0), st.floats(0.0, 1.0))
def test_a_capped_process_stays_in_its_card_and_what_the_plan_allows_fits_under_the_cap(limit, card, free):
    total = int(card * GIB)
    alone, crowded = (choices.capped_share(limit, int(part * total), total) for part in (1.0, free))
    assert 0.0 <= crowded <= alone <= LARGEST_SHARE
    assert crowded * total <= max(free * total - choices.LEFT_GIB * GIB, 0.0) + 1.0
    usable = usable_gib(min(card, limit or card))  # what the plan gives to torch's allocator
    assert usable * GIB <= alone * total or alone == 0.0


def test_a_crowded_card_is_said(monkeypatch):
    caps = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * GIB, 8 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: caps.append(share))
    said = choices.cap_memory(Config(), torch.device("cuda"))
    assert said == "other programs hold 4.0 of the card's 8.0 GiB: this run stays under 3.8"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 8 * GIB))
    assert choices.cap_memory(Config(), torch.device("cuda")) is None
    assert caps == [pytest.approx(3.8 / 8), pytest.approx(LARGEST_SHARE)]
    assert choices.cap_memory(Config(), torch.device("cpu")) is None


def test_a_run_is_planned_for_what_other_programs_leave_of_its_card(monkeypatch):
    def planned(free: float) -> Choices:
        monkeypatch.setattr(choices, "cuda_memory_gib", lambda: 12.0)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), 12 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        batch = Layer("--set", {"batch": {"effective": 16}, "memory": {"base_precision": "bf16"}})
        return chosen("sd15", batch, tier="12gb")

    alone, crowded, hardly = (planned(free) for free in (11.5, 4.0, 1.5))
    assert "other programs" not in str(alone.predicted)
    assert 0 < crowded.micro < alone.micro
    assert "of 5.0, which other programs leave of 12.0" in str(crowded.predicted)
    assert crowded.precision.value == hardly.precision.value == alone.precision.value
    assert hardly.micro == 1
    peak = float(str(crowded.predicted).split()[2])
    assert peak - CONTEXT_GIB <= 4.0 - choices.LEFT_GIB
