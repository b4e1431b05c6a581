"""How captions are read: the settings of `[text_encoder]` as a model family takes them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from lora_trainer.config.layers import Layer
from lora_trainer.config.schema.inputs import TextEncoderSection
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.findings import Finding
from lora_trainer.data.sample_counts import NEVER_TRAINED
from lora_trainer.lora_format.keys import OWN_VERSION, T5_TOKENS, WITHOUT
from lora_trainer.models.base_loras import with_loras
from lora_trainer.models.family import Family, TextOptions
from lora_trainer.models.folder import named_parts
from lora_trainer.report.read import mapping, sequence, text
from lora_trainer.run.bases.find import Base, on_stderr, silent
from lora_trainer.run_folder.record import RECORD, Record

if TYPE_CHECKING:
    from lora_trainer.config.schema import Config

READING = ("clip_skip", "max_tokens", "max_sequence_length")  # what of [text_encoder] says how captions are read


@dataclass(frozen=True)
class RunFolder:
    """The run of a LoRA file, from its `run.json`."""

    config: Config
    data_hash: str
    unseen: Finding | None = None  # the error of a LoRA that has not seen every image


def lora_of(path: Path) -> Path:
    """The LoRA that a run exported, for the run's folder; any other path itself."""
    record = Record.read(path)
    if record is None or record.files["kohya"] is None:
        return path
    return path / record.files["kohya"]


def run_beside(lora: Path, say: Callable[[str], None] = on_stderr) -> RunFolder | None:
    """The run that a file lies in."""
    record = Record.read(lora.parent)
    if record is None:
        return None
    config = record.read_config()
    if config is None:
        say(f"warning: {lora.parent / RECORD} cannot be read and is ignored")
        return None
    unseen = None
    if lora.name in record.files.values():
        for finding in map(mapping, sequence(record.lora.get("findings"))):
            if finding.get("code") == NEVER_TRAINED:
                unseen = Finding(NEVER_TRAINED, "error", text(finding.get("message")), text(finding.get("fix")))
    return RunFolder(config, record.data_hash, unseen)


def model_of_run(lora: Path, user: Sequence[Layer]) -> list[Layer]:
    """The model of a file's run, as a layer below the user's where none of them names a model."""
    sections = [layer.values.get("model") for layer in user]
    if any(isinstance(section, Mapping) and "path" in section for section in sections):
        return []
    run = run_beside(lora, silent)  # the command prints it
    if run is None or run.config.model.path is None:
        return []
    return [Layer("run.json", {"model": run.config.model.model_dump(mode="json", exclude_defaults=True)})]


def reading(config: Config, family: Family) -> Family:
    """The family with the settings' text options and `model.loras`.

    Raises UsageError for options that it does not support, and files that are not there.
    """
    if config.model.without_t5 and not family.text.optional:
        message = f"model.without_t5=true: models of {family.name} have no optional T5 text encoder."
        raise UsageError(Problem("no_t5", message, "Remove it."))
    if config.textual_inversion.placeholder_tokens and not family.text.clips:
        message = (
            f"textual_inversion.placeholder_tokens: models of {family.name} have no CLIP text encoder to learn them."
        )
        raise UsageError(Problem("no_clip", message, "Remove it."))
    return with_loras(family, config.model.loras).reading(text_options(config, family))


def refuse_lacking(trained: Collection[str], base: Base) -> None:
    """Raise UsageError for trained text encoders that the base model does not have."""
    there = named_parts(base.folder, tuple(trained))
    if lacking := [name for name in trained if name not in there]:
        message = f"text_encoder.learning_rates has a value for {lacking[0]}, which {base.named} lacks."
        raise UsageError(Problem("rate_of_missing_encoder", message, "Set it to 0, or remove it."))


def text_options(config: Config, family: Family) -> TextOptions:
    """`[text_encoder]` and `model.without_t5` as text options."""
    without = family.text.optional if config.model.without_t5 else ()
    return TextOptions(
        config.text_encoder.clip_skip, config.text_encoder.max_tokens, config.text_encoder.max_sequence_length, without
    )


def read_as_trained(
    config: Config, run: Config | None, header: Mapping[str, str], say: Callable[[str], None] = on_stderr
) -> Config:
    """The settings, with the text options of a LoRA file's run unless the settings have their own, and with its
    `noise.zero_terminal_snr`.

    They come from the run's settings next to the file, else from the header of a file of this program. Other programs'
    headers are ignored: they may name a `clip_skip` that the program did not apply.
    """
    if run is not None:
        text, without, zero = run.text_encoder, run.model.without_t5, run.noise.zero_terminal_snr
    elif OWN_VERSION in header:
        options = {
            "clip_skip": _number(header.get("ss_clip_skip")),
            "max_tokens": _number(header.get("ss_max_token_length")) or TextEncoderSection().max_tokens,
            "max_sequence_length": _number(header.get(T5_TOKENS)),
        }
        try:
            text = TextEncoderSection.model_validate(options)
        except ValidationError:
            say(f"warning: the file's header has invalid text options ({options}): the defaults are used")
            text = TextEncoderSection()
        without, zero = header.get(WITHOUT) == "True", header.get("ss_zero_terminal_snr") == "True"
    else:
        return config
    if zero:
        config = config.model_copy(update={"noise": config.noise.model_copy(update={"zero_terminal_snr": True})})
    own = {name: getattr(config.text_encoder, name) for name in READING}
    if own != {name: getattr(TextEncoderSection(), name) for name in READING}:
        return config
    read = config.text_encoder.model_copy(update={name: getattr(text, name) for name in READING})
    model = config.model.model_copy(update={"without_t5": config.model.without_t5 or without})
    return config.model_copy(update={"text_encoder": read, "model": model})


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def caches_texts(config: Config, family: Family) -> bool:
    """Whether captions are cached: where no text encoder is trained, or a large one is not."""
    return not config.trains_text or bool(
        family.text.left_in_cache(family.text_rates(config.text_encoder.learning_rates))
    )
