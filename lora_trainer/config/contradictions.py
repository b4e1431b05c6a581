"""Settings that contradict each other.

Two contradicting settings of the user are a problem. A setting from a preset or a default
gives way instead, and this is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.config.needs import how_to_use, settings_with_needs, unmet, values_in, why_idle
from lora_trainer.config.tables import names_for, traits_of_adapter, traits_of_optimizer
from lora_trainer.config.toml import section_types, shown
from lora_trainer.core.errors import Problem

# Names of layers. No file's name begins one: a file of settings is `--config PATH`, a dataset file its absolute path.
OF_PROGRAM = re.compile(r"default( \(.*)?|(family )?preset .*", re.DOTALL)
BELOW_FLAGS = re.compile(r"accelerate|(--config|config|saved preset) .*", re.DOTALL)
ABOVE_FLAGS = re.compile(r"lora\.toml")  # of a batch's folder
# What does nothing by these layers is dropped, not refused: a search or a measurement puts its own above the user's.
OF_MEASUREMENTS = re.compile(r"search( lr)?|trial \d+|bench( table| challenge)?")
SMALLEST_FACTOR = 0.01  # a learning rate below this is meant for AdamW, not as Prodigy's factor
SUGGESTED_FACTOR = 1.0
MOVES_NOTHING = (0, "auto", False)  # with `auto` the run decides
WITH_GRAPHS = ("reduce-overhead", "max-autotune")  # compile modes that record CUDA graphs
WITHOUT_FSDP = {  # settings that cannot be used with it, and why
    "memory.blocks_to_swap": "divides the blocks among GPUs, and block swap needs them whole",
    "memory.offload_activations": "frees weights that the backward pass still refers to, which would be offloaded with them",
    "train.auto_find_micro_batch_size": "needs the same passes in every process, and each would try sizes alone",
    "hardware.channels_last": "gathers weights in plain memory order",
}


@dataclass(frozen=True)
class Settings:
    """Merged values by section, and the layer that each was set by."""

    values: Mapping[str, Mapping[str, Any]]
    origin: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        section, key = name.split(".")
        return self.values[section].get(key, self.default(name))

    def default(self, name: str) -> Any:
        section, key = name.split(".")
        return section_types()[section].model_fields[key].default

    def without(self, yielding: Iterable[Yields]) -> dict[str, dict[str, Any]]:
        """The values after some gave way."""
        values = {section: dict(each) for section, each in self.values.items()}
        for clash in yielding:
            section, key = clash.name.split(".")
            values[section][key] = clash.value
        return values

    def shown(self, name: str) -> str:
        """`lr_scheduler.name = "cosine" (from preset quality)`."""
        return f"{name} = {shown(self[name])} (from {self.origin[name]})"


@dataclass(frozen=True)
class Yields:
    """A setting that takes `value` because of another one, the reason, and what a user who set it must do.

    `origin` is where the value comes from afterwards; `because` names the settings that make it do nothing.
    """

    name: str
    value: Any
    reason: str
    fix: str
    origin: str = "default (a contradiction)"
    because: tuple[str, ...] = ()


def from_user(origin: str) -> bool:
    """Whether a setting comes from the user's file or flags rather than from a default or a preset."""
    return OF_PROGRAM.fullmatch(origin) is None


def contradictions(settings: Settings) -> list[Yields]:
    """All contradictions, whoever set them, one for each setting."""
    found: dict[str, Yields] = {}
    for clash in (clash for rule in RULES for clash in rule(settings)):
        found.setdefault(clash.name, clash)
    return list(found.values())


def is_asked_for(origins: Mapping[str, str], name: str, because: Iterable[str]) -> bool:
    """Whether the user set it for this run, and nothing above it, such as a flag, is why it does nothing.

    A dataset file of kohya's scripts, whose layer is its absolute path, has values for other runs too.
    """
    origin = origins[name]
    causes = [origins[each] for each in because if each in origins]
    if not causes or not from_user(origin):
        return from_user(origin)
    is_elsewhere = Path(origin).is_absolute() or any(OF_MEASUREMENTS.fullmatch(each) for each in (origin, *causes))
    is_below = any(from_user(each) and _height(each) > _height(origin) for each in causes)
    return not is_elsewhere and not is_below


def _height(origin: str) -> int:
    """Of the user's layers: files that flags may leave without effect, flags, and a file that does so to flags."""
    if BELOW_FLAGS.fullmatch(origin):
        return 0
    return 2 if ABOVE_FLAGS.fullmatch(origin) else 1


def without_clashes(
    settings: Settings, clashes: Sequence[Yields], problems: list[Problem]
) -> tuple[Settings, list[str]]:
    """The settings after all gave way, and notes on them; those that the user set are added to `problems`.

    What gives way may leave others without effect. They give way too, and are named with it if the user set them.
    """
    wrong = [clash for clash in clashes if is_asked_for(settings.origin, clash.name, clash.because)]
    problems.extend(
        Problem("settings_contradict", f"{settings.shown(clash.name)}: {clash.reason}.", clash.fix) for clash in wrong
    )
    yielding, notes = list(clashes), list[str]()
    while yielding and not wrong:
        for each in yielding:
            if notes and is_asked_for(settings.origin, each.name, each.because):
                notes[-1] += f". {note_on(settings, each)}"
            else:
                notes.append(note_on(settings, each))
        origin = {**settings.origin, **{each.name: each.origin for each in yielding}}
        settings = Settings(settings.without(yielding), origin)
        yielding = contradictions(settings)
    return settings, notes


def note_on(settings: Settings, clash: Yields) -> str:
    """The note on a setting that gave way."""
    return f"{settings.shown(clash.name)} becomes {shown(clash.value)}: {clash.reason}"


def idle(settings: Settings) -> list[Yields]:
    """Settings that do nothing with the others as they are (`needs` in the schema)."""
    found = []
    for name in settings_with_needs():
        is_set = name.partition(".")[0] in settings.values and settings[name] != settings.default(name)
        if is_set and (lacking := unmet(settings, name)):
            reason, fix = why_idle(settings, lacking), how_to_use(lacking, name)
            found.append(Yields(name, settings.default(name), reason, fix, because=tuple(lacking)))
    return found


def prodigy_rate(settings: Settings) -> list[Yields]:
    rate, name = settings["optimizer.learning_rate"], "optimizer.learning_rate"
    # A preset's learning rate is meant for AdamW, whatever its size.
    meant_for_adamw = rate < SMALLEST_FACTOR or not from_user(settings.origin[name])
    if (
        not traits_of_optimizer(settings["optimizer.name"]).finds_learning_rate
        or not meant_for_adamw
        or rate == SUGGESTED_FACTOR
    ):
        return []
    reason = f"{settings['optimizer.name']} finds the learning rate itself, and this is a factor on it"
    return [Yields(name, SUGGESTED_FACTOR, reason, "Set optimizer.learning_rate=1.0, or remove it.")]


def adamws_rate(settings: Settings) -> list[Yields]:
    """A default's or a preset's learning rate, which is meant for AdamW, with an optimizer that needs a lower one."""
    optimizer = settings["optimizer.name"]
    share = traits_of_optimizer(optimizer).share_of_adamws_rate
    names = ["optimizer.learning_rate"]
    if settings["textual_inversion.placeholder_tokens"]:
        names.append("textual_inversion.learning_rate")
    origin = f"default (for {optimizer})"
    return [
        Yields(
            name,
            float(f"{share * settings[name]:.2g}"),
            f"it is AdamW's, and {optimizer} needs a lower one",
            "",
            origin,
        )
        for name in names
        if share != 1.0 and not from_user(settings.origin[name]) and settings.origin[name] != origin
    ]


def text_rates(settings: Settings) -> list[Yields]:
    """Learning rates of text encoders with an optimizer that has only one."""
    rates = settings["text_encoder.learning_rates"]
    (factor,) = {clash.value for clash in prodigy_rate(settings)} or {settings["optimizer.learning_rate"]}
    same = [factor if rate else 0.0 for rate in rates]
    if not traits_of_optimizer(settings["optimizer.name"]).finds_learning_rate or list(rates) == same:
        return []
    reason = f"{settings['optimizer.name']} finds one learning rate for all that is trained, and optimizer.learning_rate={factor:g} is the factor on it"
    fix = f"Set text_encoder.learning_rates={shown(same)}, or another optimizer.name."
    return [Yields("text_encoder.learning_rates", same, reason, fix)]


def no_text_rate(settings: Settings) -> list[Yields]:
    name = "text_encoder.learning_rates"
    if not settings[name] or any(settings[name]):
        return []
    fix = f"Set one above 0, such as {name}=[5e-5], or remove {name}."
    return [Yields(name, (), "it trains no text encoder: 0 leaves one as it is", fix)]


def no_prior_loss(settings: Settings) -> list[Yields]:
    """Regularization images whose loss counts nothing."""
    weight, count = "loss.prior_loss_weight", "data.num_class_images"
    if settings[weight] != 0.0:
        return []
    if settings[count]:
        reason = f"class images would be generated and trained for nothing, as {weight} is 0"
        return [Yields(count, 0, reason, f"Set {weight} above 0, or remove {count}.", because=(weight,))]
    if True not in values_in(settings, "source.is_reg"):
        return []
    reason = "regularization images would be trained for nothing"
    return [Yields(weight, settings.default(weight), reason, "Set it above 0, or remove the sources with is_reg.")]


def schedule_free(settings: Settings) -> list[Yields]:
    if not traits_of_optimizer(settings["optimizer.name"]).averages_weights:
        return []
    found = []
    if settings["lr_scheduler.name"] != "constant_with_warmup":
        reason = f"optimizer.name={settings['optimizer.name']} averages weights instead of using an LR scheduler"
        found.append(
            Yields(
                "lr_scheduler.name",
                "constant_with_warmup",
                reason,
                "Set lr_scheduler.name=constant_with_warmup, or another optimizer.name.",
            )
        )
    for name in ("train.ema_decay", "train.swa_start"):
        if settings[name] is not None:
            reason = f"optimizer.name={settings['optimizer.name']} already averages the weights"
            found.append(Yields(name, None, reason, f"Set {name}=none, or another optimizer.name."))
    if settings["optimizer.beta1"] == 0.0:
        reason = f"optimizer.name={settings['optimizer.name']} divides by beta1"
        found.append(Yields("optimizer.beta1", 0.9, reason, "Set optimizer.beta1 above 0."))
    return found


def weight_averages(settings: Settings) -> list[Yields]:
    """EMA where SWA is on: a run keeps and exports one average."""
    start, ema = settings["train.swa_start"], settings["train.ema_decay"]
    if start is None or ema is None or traits_of_optimizer(settings["optimizer.name"]).averages_weights:
        return []
    reason = f"train.swa_start={shown(start)} chooses SWA, and a run keeps one average of its weights"
    return [Yields("train.ema_decay", None, reason, "Remove train.swa_start, or train.ema_decay.")]


def momentum(settings: Settings) -> list[Yields]:
    """Cycled momentum without momentum; beta1 and limits that do not fit it."""
    name, optimizer = "lr_scheduler.cycle_momentum", settings["optimizer.name"]
    if not settings[name] or unmet(settings, name):
        return []
    if not traits_of_optimizer(optimizer).has_momentum:
        reason = f"optimizer.name={optimizer} has no momentum that may change from step to step"
        fix = f"Set optimizer.name to adamw, adamw8bit, lion or prodigy, or remove {name}."
        return [Yields(name, False, reason, fix)]
    found, (base, most) = [], ("lr_scheduler.base_momentum", "lr_scheduler.max_momentum")
    if settings["optimizer.beta1"] != (default := settings.default("optimizer.beta1")):
        reason, fix = f"{name} sets it in each step", f"Set {base} and {most}, or remove optimizer.beta1."
        found.append(Yields("optimizer.beta1", default, reason, fix))
    if settings[base] > settings[most]:
        wrong = base if settings[base] != settings.default(base) else most
        reason = f"{base}={settings[base]:g} is above {most}={settings[most]:g}"
        found.append(Yields(wrong, settings.default(wrong), reason, "Set 0.85 and 0.95, or exchange them."))
    return found


def layers(settings: Settings) -> list[Yields]:
    """Learning rates of layers with an optimizer that finds one for all of them."""
    optimizer, name = settings["optimizer.name"], "optimizer.layer_learning_rates"
    if not settings[name] or not traits_of_optimizer(optimizer).finds_learning_rate:
        return []
    reason = f"{optimizer} finds one learning rate for all that is trained"
    return [Yields(name, {}, reason, f"Remove {name}, or set another optimizer.name.")]


def random_updates(settings: Settings) -> list[Yields]:
    """Stochastic rounding that does not work."""
    found, name, optimizer = [], "optimizer.stochastic_rounding", settings["optimizer.name"]
    if settings[name] and not traits_of_optimizer(optimizer).updates_apart:
        reason = f"optimizer.name={optimizer} computes with all weights at once, which are rounded some at a time"
        fix = f"Set optimizer.name to adamw, adamw8bit, paged_adamw8bit, adafactor or lion, or remove {name}."
        found.append(Yields(name, False, reason, fix))
    elif settings[name] and (dtype := settings["memory.weight_dtype"]) in ("fp32", "fp16"):
        reason = f"memory.weight_dtype={dtype} computes in {dtype}, and only bf16 weights are rounded"
        found.append(Yields(name, False, reason, f"Set memory.weight_dtype=bf16, or remove {name}."))
    return found


def clipping(settings: Settings) -> list[Yields]:
    if settings["optimizer.clip_value"] is None or settings["optimizer.max_grad_norm"] == 0.0:
        return []
    reason = "gradients are clipped by value (optimizer.clip_value) or by norm, not both"
    return [
        Yields("optimizer.max_grad_norm", 0.0, reason, "Set optimizer.max_grad_norm=0, or remove optimizer.clip_value.")
    ]


def resolution_ceiling(settings: Settings) -> list[Yields]:
    """A resolution that is set above `data.resolution_ceiling`, which is for the model's own."""
    most = settings["data.resolution_ceiling"]
    highest = max(settings["data.resolutions"], default=settings["data.resolution"] or 0)
    if most is None or highest <= most:
        return []
    name = "data.resolutions" if settings["data.resolutions"] else "data.resolution"
    fix = f"Set {name} to {most} or lower, or remove data.resolution_ceiling."
    return [Yields("data.resolution_ceiling", None, f"{settings.shown(name)} is above it", fix)]


def rank_ceiling(settings: Settings) -> list[Yields]:
    """A rank above `lora.max_rank`: the user's own rank wins, any other is lowered."""
    rank, ceiling = settings["lora.rank"], settings["lora.max_rank"]
    if ceiling is None or rank <= ceiling:
        return []
    if not from_user(settings.origin["lora.rank"]):
        origin = f"{settings.origin['lora.max_rank']} (lora.max_rank)"
        return [Yields("lora.rank", ceiling, f"{settings.shown('lora.max_rank')} is the ceiling", "", origin)]
    reason = f"{settings.shown('lora.rank')} is above it"
    return [Yields("lora.max_rank", None, reason, f"Set lora.rank={ceiling} or lower, or remove lora.max_rank.")]


def adapters(settings: Settings) -> list[Yields]:
    """Settings that the kind of adapter, the initialization or the optimizer cannot follow."""
    found, kind, initial = [], settings["lora.type"], settings["lora.init_lora_weights"]

    def drop(name: str, reason: str, fix: str) -> None:
        if settings[f"lora.{name}"] != (default := settings.default(f"lora.{name}")):
            found.append(Yields(f"lora.{name}", default, reason, fix))

    for name, why in sorted(traits_of_adapter(kind).ignores.items()):
        able = next(each for each in names_for("lora.type") if name not in traits_of_adapter(each).ignores)
        drop(name, f"lora.type={kind} cannot follow it: {why}", f"Set lora.type={able}, or remove lora.{name}.")
    rank = max([settings["lora.rank"], *settings["lora.rank_pattern"].values()])
    if (settings["lora.timestep_min_rank"] or 0) > rank:
        reason = f"no layer's rank is so high (the largest is {rank}), so all rows would be trained at each timestep"
        drop("timestep_min_rank", reason, f"Set it below {rank}; half of the rank is the paper's.")
    elif settings["compile.enabled"]:
        reason = "compile.enabled compiles the blocks, in which the trained rows differ from step to step"
        drop("timestep_min_rank", reason, "Set compile.enabled=false, or remove lora.timestep_min_rank.")
    if initial.startswith(("pissa", "olora")):
        reason = f"lora.init_lora_weights={initial} starts from parts of the base model's weights"
        for name in ("timestep_min_rank", "network_weights"):
            drop(name, reason, f"Set lora.init_lora_weights=default, or remove lora.{name}.")
    if traits_of_optimizer(optimizer := settings["optimizer.name"]).finds_learning_rate:
        for name in ("loraplus_lr_ratio", "loraplus_text_encoder_lr_ratio"):
            reason = f"{optimizer} finds one learning rate for all that is trained"
            drop(name, reason, f"Remove lora.{name}, or set another optimizer.name.")
    return found


def sizes(settings: Settings) -> list[Yields]:
    found = []
    if settings["data.resolutions"] and settings["data.resolution"] is not None:
        reason = "data.resolutions sets the training resolutions"
        found.append(Yields("data.resolution", None, reason, "Remove one of them."))
    if settings["data.bucket_no_upscale"] and settings["data.allow_small_images"]:
        reason = "with data.bucket_no_upscale nothing is enlarged"
        found.append(Yields("data.allow_small_images", False, reason, "Remove one of them."))
    return found


def captions(settings: Settings) -> list[Yields]:
    found = []
    if settings["captions.dropout"] == 1.0:
        reason = "every caption would be empty, so none is learned"
        found.append(Yields("captions.dropout", 0.0, reason, "Set captions.dropout to 0.1 or so."))
    if settings["captions.dropout_every_n_epochs"] == 1:
        reason = "every caption of every epoch would be empty, so none is learned"
        found.append(
            Yields("captions.dropout_every_n_epochs", 0, reason, "Set captions.dropout_every_n_epochs to 2 or more.")
        )
    kept = settings["captions.keep_tokens"] or settings["captions.keep_tokens_separator"]
    if settings["captions.tag_dropout"] == 1.0 and not kept:
        reason = "every tag of every caption would be dropped"
        found.append(Yields("captions.tag_dropout", 0.0, reason, "Set it lower, or captions.keep_tokens to 1 or more."))
    if settings["captions.keep_tokens_separator"] == settings["captions.separator"]:
        reason = "it is the same as captions.separator, so the end of the kept tags is unknown"
        found.append(
            Yields(
                "captions.keep_tokens_separator",
                None,
                reason,
                "Set captions.keep_tokens_separator to text such as |||.",
            )
        )
    varying = [name for name in ("shuffle", "wildcards", "tag_dropout") if settings[f"captions.{name}"]]
    if varying and settings["captions.variants"] == 1:
        reason = f"captions.{varying[0]} makes several texts of a caption, and only one would be trained"
        found.append(Yields("captions.variants", 8, reason, "Set captions.variants to 8 or so."))
    return found


def determinism(settings: Settings) -> list[Yields]:
    if not settings["train.deterministic"]:
        return []
    attention, mode = settings["hardware.attention_backend"], settings["compile.mode"]
    same, found = "train.deterministic needs the same bits each time", []
    if attention not in ("auto", "fastest", "sdpa", "flash", "math"):
        fix = "Set hardware.attention_backend=sdpa, or train.deterministic=false."
        found.append(
            Yields("hardware.attention_backend", "sdpa", f"{same}, and {attention} does not guarantee them", fix)
        )
    if settings["compile.enabled"] and mode.startswith("max-autotune"):
        fix = "Set compile.mode=default, or train.deterministic=false."
        found.append(Yields("compile.mode", "default", f"{same}, and {mode} chooses by speed", fix))
    if settings["hardware.cudnn_benchmark"] is True:
        fix = "Set hardware.cudnn_benchmark=auto, or train.deterministic=false."
        found.append(Yields("hardware.cudnn_benchmark", False, f"{same}, and cuDNN's benchmark chooses by speed", fix))
    return found


def memory(settings: Settings) -> list[Yields]:
    found = []
    if settings["memory.checkpointing_mode"] == "selective" and settings["compile.enabled"] is True:
        reason = "single results inside a compiled block cannot be kept"
        fix = "Set memory.checkpointing_mode=full, or compile.enabled=false."
        found.append(Yields("memory.checkpointing_mode", "full", reason, fix))
    strategy = settings["memory.fsdp"]
    for name in WITHOUT_FSDP if strategy else ():
        if settings[name] not in MOVES_NOTHING:
            reason = f"memory.fsdp={strategy} {WITHOUT_FSDP[name]}"
            found.append(Yields(name, settings.default(name), reason, f"Remove {name}, or memory.fsdp."))
    moves = [
        name
        for name in ("blocks_to_swap", "offload_activations", "fsdp")
        if settings[f"memory.{name}"] not in (*MOVES_NOTHING, None)
    ]
    if moves and settings["compile.enabled"] and settings["compile.mode"] in WITH_GRAPHS:
        name, reason = "compile.mode", f"CUDA graphs hold addresses, and memory.{moves[0]} changes them"
        found.append(Yields(name, "default", reason, f"Set {name}=default, or remove memory.{moves[0]}."))
    return found


def control(settings: Settings) -> list[Yields]:
    found = []
    if settings["safeguards.on_nonfinite"] == "rollback" and not settings["checkpoint.save_state"]:
        reason = "a checkpoint without the optimizer's state cannot be rolled back to (checkpoint.save_state=false)"
        fix = "Set safeguards.on_nonfinite=skip, or remove checkpoint.save_state=false."
        found.append(Yields("safeguards.on_nonfinite", "skip", reason, fix))
    if settings["safeguards.reduce_lr_on_plateau"] and traits_of_optimizer(settings["optimizer.name"]).averages_weights:
        reason = f"optimizer.name={settings['optimizer.name']} averages weights instead of lowering the learning rate"
        found.append(
            Yields(
                "safeguards.reduce_lr_on_plateau",
                False,
                reason,
                "Remove safeguards.reduce_lr_on_plateau, or set another optimizer.name.",
            )
        )
    if settings["safeguards.early_stopping_metric"] == "agreement" and not settings["validation.agreement"]:
        reason = "it is not measured with validation.agreement=false"
        fix = "Set validation.agreement=true, or safeguards.early_stopping_metric=loss."
        found.append(Yields("safeguards.early_stopping_metric", "loss", reason, fix))
    if settings["safeguards.early_stopping"] and settings["checkpoint.export_weights"] == "last":
        reason = "safeguards.early_stopping trains past the best weights and exports the best ones"
        fix = "Set checkpoint.export_weights=best, or remove safeguards.early_stopping."
        found.append(Yields("checkpoint.export_weights", "best", reason, fix))
    if (
        settings["safeguards.clip_on_loss_spike"]
        and settings["safeguards.loss_spike_lr"] == 1.0
        and settings["optimizer.max_grad_norm"] == 0.0
        and settings["optimizer.clip_value"] is None
    ):
        reason = "with safeguards.loss_spike_lr=1 it only clips gradients harder, and optimizer.max_grad_norm=0 does not clip them"
        found.append(
            Yields("safeguards.clip_on_loss_spike", False, reason, "Set optimizer.max_grad_norm to 1.0 or so.")
        )
    return found


def targets_of_the_base(settings: Settings) -> list[Yields]:
    """A target by the frozen text encoders, where text encoders are trained."""
    setting = {
        "text_encoder.learning_rates": any(settings["text_encoder.learning_rates"]),
        "textual_inversion.placeholder_tokens": bool(settings["textual_inversion.placeholder_tokens"]),
    }
    trained = [name for name, is_set in setting.items() if is_set]
    if not trained:
        return []
    reason = f"its target is of the base model as it was, and {trained[0]} trains its text encoders"
    off = {"loss.guidance_target": None, "loss.output_preservation_weight": 0.0}
    asked = [name for name, value in off.items() if settings[name] != value]
    return [Yields(name, off[name], reason, f"Remove {name}, or {trained[0]}.") for name in asked]


def learned_tokens(settings: Settings) -> list[Yields]:
    name = "textual_inversion.learning_rate"
    if not settings["textual_inversion.placeholder_tokens"]:
        return []
    (factor,) = {clash.value for clash in prodigy_rate(settings)} or {settings["optimizer.learning_rate"]}
    if not traits_of_optimizer(settings["optimizer.name"]).finds_learning_rate or settings[name] == factor:
        return []
    reason = f"{settings['optimizer.name']} finds one learning rate for all that is trained, and optimizer.learning_rate={factor:g} is the factor on it"
    return [Yields(name, factor, reason, f"Set {name}={factor:g}, or another optimizer.name.")]


def wrong_placeholder_tokens(settings: Settings) -> list[Problem]:
    """Learned tokens that other words contain or equal; only a user can have named them.

    Tokenizers also find them inside other words, and ignore case.
    """
    tokens = [str(token) for token in settings["textual_inversion.placeholder_tokens"]]
    lowered = [token.lower() for token in tokens]
    twice = sorted({token for token in lowered if lowered.count(token) > 1})
    found = [
        Problem(
            "token_inside_words",
            f"{settings.shown('textual_inversion.placeholder_tokens')}: {token!r} would also be found inside other words.",
            f"Write <{token.strip('<>')}>, in captions as well.",
        )
        for token in dict.fromkeys(tokens)
        if token[:1].isalnum() or token[-1:].isalnum()
    ]
    if twice:
        found.append(
            Problem(
                "token_twice",
                f"{settings.shown('textual_inversion.placeholder_tokens')} names {twice[0]!r} twice.",
                "Name each token once.",
            )
        )
    return found


RULES: tuple[Callable[[Settings], list[Yields]], ...] = (
    idle,
    resolution_ceiling,
    rank_ceiling,
    prodigy_rate,
    adamws_rate,
    no_text_rate,
    no_prior_loss,
    text_rates,
    schedule_free,
    weight_averages,
    momentum,
    layers,
    random_updates,
    clipping,
    adapters,
    sizes,
    captions,
    determinism,
    memory,
    control,
    targets_of_the_base,
    learned_tokens,
)


def captions_of_sources(settings: Settings) -> list[Problem]:
    """Contradictions in the captions of single sources, which only a user can have set."""
    found = []
    for number, source in enumerate(settings["data.sources"]):
        own = source.get("captions") if isinstance(source, Mapping) else getattr(source, "captions", None)
        if own is None:
            continue
        values = dict(own) if isinstance(own, Mapping) else own.model_dump()
        named = {f"captions.{key}": f"data.sources[{number}]" for key in section_types()["captions"].model_fields}
        own_settings = Settings({"captions": values}, named)
        for clash in [*captions(own_settings), *idle(own_settings)]:
            setting = f"data.sources[{number}].{clash.name} = {shown(values.get(clash.name.partition('.')[2]))}"
            found.append(Problem("settings_contradict", f"{setting}: {clash.reason}.", clash.fix))
    return found


def idle_lengths(settings: Settings, notes: list[str]) -> list[Problem]:
    """Lengths of the run that steps or epochs leave without effect: a problem of flags. Of a file only a note is added: a
    run's own config.toml has those of its presets."""
    problems = list[Problem]()
    cause = next((name for name in ("train.max_steps", "train.max_epochs") if settings[name] is not None), None)
    for name in ("train.total_repeats", "train.step_ceiling"):
        if cause is None or settings[name] == settings.default(name):
            continue
        message = f"{settings.shown(name)} does nothing: {cause} sets how long the run is"
        if BELOW_FLAGS.fullmatch(settings.origin[name]):
            notes.append(message)
        elif is_asked_for(settings.origin, name, [cause]):
            problems.append(Problem("setting_has_no_effect", f"{message}.", f"Remove {name}, or {cause}."))
    return problems


def steps_and_epochs(settings: Settings) -> list[Problem]:
    """Two lengths of the run: a problem whoever set them, since it is unclear which one is meant."""
    if settings["train.max_steps"] is None or settings["train.max_epochs"] is None:
        return []
    message = f"{settings.shown('train.max_steps')} and {settings.shown('train.max_epochs')} contradict each other."
    fix = "Remove one of them, or empty it: --set train.max_epochs=none (or --set train.max_steps=none)."
    return [Problem("settings_contradict", message, fix)]
