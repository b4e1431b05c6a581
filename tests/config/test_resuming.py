"""Every setting defines what it means for a resumed run."""

from __future__ import annotations

from typing import get_args

from lora_trainer.config.resuming import settings_that
from lora_trainer.config.schema.types import OnResume
from lora_trainer.config.toml import setting_names


def test_every_setting_says_what_it_means_for_a_resumed_run():
    """A field that is made without `setting` says nothing, and a resumed run would change it silently."""
    assert {name for kind in get_args(OnResume) for name in settings_that(kind)} == set(setting_names())
