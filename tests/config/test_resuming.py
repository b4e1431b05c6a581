"""Every setting defines what it means for a resumed run."""

from __future__ import annotations

from collections import Counter

from lora_trainer.config.resuming import KINDS
from lora_trainer.config.toml import setting_names


def test_every_setting_is_in_exactly_one_list():
    """A new setting must be in one of them, or a resumed run would change it silently."""
    assert Counter(name for kind in KINDS for name in kind) == Counter(setting_names())
