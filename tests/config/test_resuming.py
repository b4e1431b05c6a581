"""Every setting says what it means to a run that is resumed."""

from __future__ import annotations

from collections import Counter

from lora_trainer.config.resuming import KINDS
from lora_trainer.config.toml import setting_names


def test_every_setting_is_in_exactly_one_list():
    """A new setting belongs into one of them, or a resumed run would take it without a word or a refusal."""
    assert Counter(name for kind in KINDS for name in kind) == Counter(setting_names())
