"""Settings by what they mean for a resumed run, which each field of the schema says (`OnResume`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_trainer.config.toml import section_types

if TYPE_CHECKING:
    from lora_trainer.config.schema.types import OnResume


def settings_that(on_resume: OnResume) -> tuple[str, ...]:
    return tuple(
        f"{section}.{name}"
        for section, kind in section_types().items()
        for name, field in kind.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["on_resume"] == on_resume
    )


FIXED = settings_that("fixed")
FIXED_IN_EFFECT = settings_that("fixed in effect")
CHANGES_TRAINING = settings_that("changes training")
CHANGES_NOTHING = settings_that("changes nothing")
# Of each source too: which part of an image is trained, at which size and with which changes; which texts a caption becomes.
SHOWN_BY = tuple(name.removeprefix("data.") for name in FIXED if name.startswith("data."))
CHANGE_TEXTS = tuple(name.removeprefix("captions.") for name in FIXED if name.startswith("captions."))
