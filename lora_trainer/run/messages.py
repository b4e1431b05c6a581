"""The lines that a run prints at its start and at its end."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.config.contradictions import from_user
from lora_trainer.config.layers import Resolved, flattened
from lora_trainer.config.presets import BASES, CHOSEN, presets
from lora_trainer.config.schema import CaptionsSection, Config
from lora_trainer.core.errors import LORA_REFUSED, Problem, UsageError, UserError
from lora_trainer.core.findings import counted, printable
from lora_trainer.data.captions import most_choices
from lora_trainer.data.split import FEWEST_COMPARED
from lora_trainer.evaluation.part_words import WORDS
from lora_trainer.models.folder import read_config
from lora_trainer.monitor.progress_line import duration
from lora_trainer.run.inputs import LATENT_BYTES, Inputs, caption_rules, latent_bytes, own_architecture
from lora_trainer.run_folder.record import RECORD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from lora_trainer.data.sample import Sample
    from lora_trainer.data.steps import StepArithmetic
    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.lora_report import LoraReport
    from lora_trainer.models.family import Family, ModelFacts
    from lora_trainer.models.lora_clients import Client
    from lora_trainer.run.order import Order
    from lora_trainer.run_folder.record import Record


MOST_FINDINGS, FINDINGS_ON_SCREEN = 8, 2
# In the names of models distilled for few steps whose configs are those of their base.
DISTILLED_NAMES = re.compile(r"turbo|lightning|schnell|(?<![a-z])(?:hyper|lcm|dmd2?|flash)(?![a-z])", re.IGNORECASE)
VELOCITY_NAMES = re.compile(r"v[-_ ]?pred", re.IGNORECASE)
CHECKPOINTS = (".safetensors", ".gguf")
CAPTIONS_SHOWN, TEXTS_SHOWN = 3, 2
SEVERITIES = ("error", "warning", "note")  # in the order of the lines at the end


def distilled_line(config: Config, family: Family, facts: ModelFacts) -> str | None:
    """A warning for a model that was distilled to generate in few steps, which plain training undoes, with the choices.

    By its config, or where that is the same as others' by the name of its files. Where one of the choices is made there
    is none; `loss.guidance_target` on a model that is sampled with a guidance scale is one of its own.
    """
    base = facts.distilled_from or ("the model that it was made from" if DISTILLED_NAMES.search(facts.name) else "")
    scale = config.loss.guidance_target
    if scale is not None and not base and family.pipeline.sampling_defaults(facts.path).guided:
        return (
            f"warning: loss.guidance_target={scale:g} is for models that were distilled to need no guidance, and {facts.name} is sampled"
            " with a guidance scale: the LoRA learns guidance that sampling adds again. Remove loss.guidance_target"
        )
    if not base or scale is not None or config.model.training_adapter is not None:
        return None
    return (
        f"warning: {facts.name} is distilled to generate in few steps, and training it as it is undoes that. Choose one:"
        f" train on {base} and generate with either model; set model.training_adapter to a LoRA made for this model;"
        " or set loss.guidance_target=3 (docs/distilled.md)"
    )


def known_base_line(resolved: Resolved, facts: ModelFacts) -> str | None:
    """Which well-known model this one was made from, by its metadata or its name, with the preset for it.

    The preset is not named where it is chosen or prompts have a prefix already; where that of another model is chosen,
    the line is a warning.
    """
    bases = [preset for preset in presets().values() if preset.kind == BASES]
    chosen = next((preset.name for preset in bases if CHOSEN + preset.name in resolved.origin.values()), "")
    names = {f"the title {facts.title!r} in its metadata": facts.title, f"its name {facts.name}": facts.name}
    for by, name in names.items():
        base = next((preset for preset in bases if re.search(preset.model_names, name, re.IGNORECASE)), None)
        if base is not None and base.family == facts.family:
            known = base.name
            line = f"base model: {known} by {printable(by)}"
            if chosen and chosen != known:
                return f"warning: {line}, and --preset {chosen} is for another. --preset {known} is for this one"
            follows = chosen or resolved.config.sample.prompt_prefix
            return line if follows else f"{line}. --preset {known} sets captions and sample prompts for it"
    return None


def unmarked_velocity_line(config: Config, facts: ModelFacts) -> str | None:
    """A warning for a model that is V-Pred by its name or title, and predicts noise by everything else."""
    named = next((name for name in (facts.title, facts.name) if VELOCITY_NAMES.search(name)), "")
    if not named or facts.prediction != "epsilon" or config.model.prediction_type is not None:
        return None
    a_file = facts.name.lower().endswith(CHECKPOINTS)
    where, setting = (
        ("keys or metadata", "model.prediction_type=") if a_file else ("scheduler config", "prediction_type in it to ")
    )
    return (
        f"warning: {printable(named)} looks like a model that predicts velocity (V-Pred), but its {where} do not show"
        f" it, so it is trained as one that predicts noise (epsilon). If it is V-Pred, set {setting}v_prediction"
    )


def velocity_line(config: Config, facts: ModelFacts, process: Process) -> str:
    """That the model predicts velocity, what shows it, and whether its last timestep holds no signal."""
    zero = config.noise.zero_terminal_snr or bool(process.alphas_cumprod[-1] == 0)
    schedule = (
        "the last timestep holds no signal (zero terminal SNR)" if zero else "the last timestep holds some signal"
    )
    return f"prediction: velocity (v_prediction) by {facts.prediction_by or 'its scheduler config'}; {schedule}"


def model_lines(resolved: Resolved, inputs: Inputs) -> tuple[str, ...]:
    """What the model was recognized as, the VAE where it is not its own, a flow's timesteps, and which trained encoders
    diffusers ignores."""
    config = resolved.config
    recognized = (
        known_base_line(resolved, inputs.facts),
        unmarked_velocity_line(config, inputs.facts),
        distilled_line(config, inputs.family, inputs.facts),
    )
    lines = [line for line in recognized if line]
    if config.model.vae is not None:
        scale = read_config(inputs.facts.path, "vae/config.json").get("scaling_factor")
        a_file = config.model.vae.endswith(".safetensors")
        assumed = f" (scaling_factor {scale} is this model's: the file has none and must be of the same family)"
        lines.append(f"VAE: {config.model.vae}{assumed if a_file and scale is not None else ''}")
    own = inputs.family.denoiser.make_process(inputs.facts.path)
    if own.prediction == "v_prediction":
        lines.append(velocity_line(config, inputs.facts, own))
    if own.prediction == "flow":
        facts, shift = inputs.facts, config.flow.shift
        side = inputs.resolution // facts.downscale
        size = f" at {inputs.resolution} px"
        origin = {"model": "the model's own", "resolution": "by resolution"}.get(str(shift), "flow.shift")
        from lora_trainer.diffusion.timesteps import flow_times

        times = flow_times(config.flow, own.times.shift)
        lines.append(f"timesteps: {times.describe((side, side))}{size if times.shift.by_size else ''} ({origin})")
    trained = inputs.family.text_rates(config.text_encoder.learning_rates)
    lines += [
        f"{name} (T5) is trained: ComfyUI and sd-scripts read its LoRA, diffusers' load_lora_weights ignores it"
        for name in inputs.family.text.cached
        if name in trained
    ]
    return tuple(lines)


def length_lines(resolved: Resolved, steps: StepArithmetic) -> list[str]:
    """What the run is too short for."""
    config, total, lines = resolved.config, steps.total, list[str]()
    warmup, every = config.lr_scheduler.warmup_steps, config.validation.every_n_steps
    if warmup is not None and warmup > total:
        lines.append(
            f"warning: lr_scheduler.warmup_steps={warmup}, and the run has {counted(total, 'step')}: the learning rate rises"
            " until the end, where it is the set one"
        )
    waits = {
        "safeguards.early_stopping": config.safeguards.patience + 1 if config.safeguards.early_stopping else None,
        "safeguards.reduce_lr_on_plateau": (
            config.safeguards.plateau_window if config.safeguards.reduce_lr_on_plateau else None
        ),
    }
    for name, least in waits.items():
        if least is not None and every and least * every >= total:
            lines.append(
                f"warning: {name} does nothing in this run: it acts after {counted(least, 'validation')} at the soonest,"
                f" step {least * every}, and the run has {counted(total, 'step')} (validation.every_n_steps={every})"
            )
    intervals = {
        "checkpoint.export_every_n_steps": (config.checkpoint.export_every_n_steps, total, "step"),
        "checkpoint.export_every_n_epochs": (config.checkpoint.export_every_n_epochs, steps.epochs, "epoch"),
        "sample.every_n_steps": (config.sample.every_n_steps, total, "step"),
        "captions.dropout_every_n_epochs": (config.captions.dropout_every_n_epochs, steps.epochs, "epoch"),
    }
    for name, (interval, length, unit) in intervals.items():
        if interval and interval > length and from_user(resolved.origin[name]):
            lines.append(f"warning: {name}={interval} does nothing: the run has {counted(length, unit)}")
    return lines


def refuse_without_validation(config: Config, inputs: Inputs) -> None:
    """Raise UsageError for settings that need validation images, in a run that has none."""
    problems = [
        Problem(
            "no_validation_images",
            f"{name} needs validation losses, and no images are kept for validation.",
            f"Set validation.split=0.1, or remove {name}.",
        )
        for name, is_set in {
            "safeguards.reduce_lr_on_plateau": config.safeguards.reduce_lr_on_plateau,
            "safeguards.early_stopping": config.safeguards.early_stopping,
            "checkpoint.keep_best": config.checkpoint.keep_best > 0,
        }.items()
        if is_set and not inputs.validation
    ]
    watched = config.safeguards.early_stopping and config.safeguards.early_stopping_metric == "agreement"
    captions = [sample.caption for sample in inputs.validation]
    if watched and captions and (len(captions) < FEWEST_COMPARED or len(set(captions)) < 2):
        few = f"only {counted(len(captions), 'image')} of {FEWEST_COMPARED} are kept for validation"
        reason = few if len(captions) < FEWEST_COMPARED else "all validation images have the same caption"
        fix = "Set safeguards.early_stopping_metric=loss" + (
            ", or validation.split=0.2 or so." if few == reason else "."
        )
        message = f"safeguards.early_stopping_metric=agreement compares captions of validation images, and {reason}."
        problems.append(Problem("agreement_not_possible", message, fix))
    if problems:
        raise UsageError(problems)


def announce(config: Config, console: Console) -> None:
    """Which model is used where `--model` names none."""
    if config.model.path is None:
        console.print("model: built-in miniature Stable Diffusion 1.5, 128 px (no --model)")
        if config.data.sources:
            console.print(
                "note: this model is for trials only. `lora-trainer check` without --model assumes a model of 512 px,"
                " so its buckets differ."
            )


def print_row(console: Console, line: str, *, verbose: bool) -> None:
    """Print a line; on a terminal it is cut to one row, so that all before the progress bar fit a screen.

    Warnings stay whole, and so does everything with `verbose`, in files and in run.json.
    """
    if console.is_terminal and not verbose and not line.startswith(("warning:", "note:")) and len(line) > console.width:
        line = f"{line[: console.width - 1]}…"
    console.print(line, markup=False, soft_wrap=True)


def show_report(config: Config, inputs: Inputs, console: Console, *, verbose: bool = False) -> None:
    """The dataset's score and its findings, worst first; on a terminal the first two kinds, unless `verbose`."""
    report = inputs.report
    name = counted(len(report.samples), "sample") if config.data.sources else 'built-in mascot "pomo"'
    line = f"{name}, score {report.score:.2f} (minimum {report.gate:.2f})"
    console.print(f"dataset: {line if report.samples else report.none_usable}")
    # Errors end the run, which prints each kind of them once.
    found = [(code, group) for code, group in report.grouped if group[0].severity != "error"]
    most = FINDINGS_ON_SCREEN if console.is_terminal and not verbose else MOST_FINDINGS
    for code, group in found[:most]:
        console.print(f"  {group[0].severity}: {report.message(code, group)} {group[0].fix}".rstrip())
    if len(found) > most:
        console.print(f"  … and {counted(len(found) - most, 'more kind')}: `lora-trainer check` shows all")
    for note in report.notes[:most]:
        console.print(f"  note: {note}")


def of_each_source(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most `most` samples in their order: the first of each source, then the next ones."""
    first = {sample.source: place for place, sample in reversed(list(enumerate(samples)))}
    places = sorted(first.values())[:most]
    places += [place for place in range(min(most, len(samples))) if place not in places]
    return [samples[place] for place in sorted(places[:most])]


def show_views(
    config: Config, inputs: Inputs, steps: StepArithmetic, console: Console, *, verbose: bool = False
) -> None:
    """The buckets; where images have several variants, their size on disk and how many are used."""
    plan = inputs.train_plan
    for line in plan.lines:
        print_row(console, line, verbose=verbose)
    if plan.most == 1:
        return
    size, limit = (
        latent_bytes(inputs.train, plan, inputs.facts, LATENT_BYTES[config.cache.latents_dtype]) / 1e9,
        config.cache.limit_gb,
    )
    storage = f"{in_gigabytes(size)} of latents on disk" if config.cache.latents else "encoded while training"
    console.print(f"variants: up to {plan.most} of each image, used in turn, {storage}")
    if config.cache.latents and size > limit / 2:
        console.print(
            f"note: this is most of cache.limit_gb={limit:g}. Set data.crop_variants or data.color_variants lower."
        )
    seen = steps.exposures()
    if seen < plan.most:
        console.print(f"note: {steps.total} steps show an image about {seen:.1f} times, so not all of its variants")


def in_gigabytes(size: float) -> str:
    """`1.5 GB`, `212 MB`, `1.5 MB`."""
    return f"{size:.1f} GB" if size >= 1 else f"{1000 * size:.{0 if size >= 0.01 else 1}f} MB"


def show_captions(config: Config, inputs: Inputs, console: Console, itemsize: int, *, verbose: bool = False) -> None:
    """The texts of three images, what caption variants take on disk, and settings that have no effect.

    `itemsize`: bytes of a number in the cache of text embeddings.
    """
    rules = caption_rules(config)
    shares = sorted({own.dropout for own in rules if own.dropout})
    dropped = f", empty {' or '.join(f'{share:.0%}' for share in shares)} of the time" if shares else ""
    console.print(f"captions, for example{dropped}:")
    for sample in of_each_source(inputs.train, CAPTIONS_SHOWN):
        for line in caption_lines(sample):
            print_row(console, f"  {line}", verbose=verbose)
    for line in (*variant_lines(config, inputs, itemsize), *no_effect_notes(config, rules, inputs)):
        console.print(line, markup=False)


def caption_lines(sample: Sample) -> list[str]:
    """The text that an image is trained on; where it is not the canonical one, that one and the first texts trained."""
    name, texts = printable(sample.path.name), list(dict.fromkeys(sample.texts))
    if texts == [sample.caption]:
        return [f"{name}: trained on {sample.caption!r}"]
    lines = [f"{name}: canonical {sample.caption!r}, trained on {counted(len(texts), 'text')}:"]
    lines += [f"  {text!r}" for text in texts[:TEXTS_SHOWN]]
    return lines + ([f"  … and {len(texts) - TEXTS_SHOWN} more"] if len(texts) > TEXTS_SHOWN else [])


def variant_lines(config: Config, inputs: Inputs, itemsize: int) -> list[str]:
    """`up to 8 texts for each of 120 captions: 960 texts, 212 MB`; a note where that is most of the cache's limit."""
    varied = {sample.caption: sample.texts for sample in inputs.train if len(sample.texts) > 1}
    if not varied:
        return []
    shapes = inputs.family.text.cond_shapes(own_architecture(inputs).denoiser)
    count = len({text for texts in varied.values() for text in texts})
    size = count * itemsize * sum(math.prod(shape) for shape in shapes.values()) / 1e9
    most, limit = max(len(set(texts)) for texts in varied.values()), config.cache.limit_gb
    texts = f"{counted(count, 'text')}, {in_gigabytes(size)}"
    lines = [f"up to {most} texts for each of {counted(len(varied), 'caption')}: {texts}"]
    if size > limit / 2:
        lines.append(f"note: this is most of cache.limit_gb={limit:g}. Set captions.variants lower.")
    return lines


def overridden_by_sources(config: Config) -> list[str]:
    """A line on each setting of all data that does nothing, because every source has its own."""
    own = {f"data.{key}": key for key in ("crop", "flip", "color_variants", "resolutions")}
    own |= {f"captions.{key}": "captions" for key in CaptionsSection.model_fields}
    values, usual = flattened(config), flattened(Config())
    return [
        f"{name} does nothing: every source of data.sources has its own {key}"
        for name, key in own.items()
        if config.data.sources
        and values[name] != usual[name]
        and all(getattr(source, key) is not None for source in config.data.sources)
    ]


def no_effect_notes(config: Config, rules: Sequence[CaptionsSection], inputs: Inputs) -> list[str]:
    """Settings of the data that do nothing with the others as they are."""
    notes = [f"note: {line}" for line in overridden_by_sources(config)]
    for sample in inputs.report.samples if any(own.wildcards for own in rules) else ():
        choices, variants = most_choices(sample, rules), rules[sample.source].variants
        if choices > variants:
            where = inputs.report.name_of(sample.path)
            notes.append(
                f"note: captions.variants={variants} is fewer than the {choices} choices of {where}: set it higher"
            )
            break
    return notes


def show_end(record: Record, report: LoraReport, folder: Path, comparison: Path | None, console: Console) -> None:
    """Both scores with the findings, and where everything is. The time is that of the steps, over all sessions.

    Why a gate refuses the LoRA is the error that ends the command, and is not printed here too.
    """
    console.print()
    console.rule(
        f"{record.name}: {counted(record.steps, 'step')} in {duration(record.training['seconds'])}", style="dim"
    )
    console.print(f"dataset: score {record.scores['dataset']:.2f}")
    if report.score is None:
        lora = folder / f"{record.name}.safetensors"
        console.print(f"LoRA: not scored. To score it: lora-trainer validate {lora}", soft_wrap=True, markup=False)
    else:
        console.print(lora_line(report))
    printed_later = report.reasons if record.exit_code == LORA_REFUSED else ()
    findings = [finding for finding in report.findings if finding.message not in printed_later]
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity)):
        console.print(f"  {finding.severity}: {finding.message}")
        if finding.fix:
            console.print(f"    {finding.fix}")
    kohya = folder / f"{record.name}.safetensors"
    if advice := record.lora.get("choice", {}).get("advice"):
        console.print(f"advice: {advice}")
    elif report.score is not None:
        console.print("strength: 1.0; to compare others:")
        console.print(f"  lora-trainer validate {kohya} --compare strengths", soft_wrap=True, markup=False)
    console.print(f"exported: step {record.released['step']} ({record.released['reason']})")
    where = {
        f"for {readers(kohya)}": kohya,
        "for diffusers": folder / f"{record.name}.diffusers.safetensors",
        "before / after": comparison,
        "ComfyUI workflow": folder / name if (name := record.files.get("comfyui")) else None,
        "prompt for A1111, Forge": folder / name if (name := record.files.get("a1111")) else None,
        "copied to": Path(record.copied_to) if record.copied_to else None,
        "report": folder / "report.html" if record.files.get("report") else None,
        "record": folder / RECORD,
    }
    for what, path in where.items():
        if path is not None:
            program = "ComfyUI" if path == kohya else "diffusers" if what == "for diffusers" else None
            why = next((each.why for each in _clients(path) if each.name == program), "") if program else ""
            console.print(f"{what:<26}{path}{why and f' ({why})'}", soft_wrap=True, markup=False)
    if not record.setting("model.path"):
        console.print("It fits the built-in miniature alone: other models need a LoRA of their own (--model).")
    for name in (file for kind, file in record.files.items() if file and kind.startswith("embedding-")):
        console.print(f"{'learned token':<26}{folder / name} (ComfyUI: models/embeddings)", soft_wrap=True)


def describe_stop(order: Order, record: Record) -> str:
    """What is saved after a signal, and the command that resumes."""
    config = order.folder / "config.toml"
    trainer = "produce" if order.enforce_gates else "train"
    command = f"lora-trainer {trainer} --config {shlex.quote(str(config))} --resume"
    again = command if config.is_file() else f"the same command, --name {shlex.quote(record.name)} and --resume"
    if not record.steps:
        return f"stopped before the first step; the caches are kept. To resume: {again}"
    if (lora := record.files.get("kohya")) and not order.config.checkpoint.save_state:
        check = f"lora-trainer validate {shlex.quote(str(order.folder / lora))}"
        return f"stopped after training: {order.folder / lora} is complete and can be used. To score it: {check}"
    if lora:  # of this session
        return (
            f"stopped after training: {order.folder / lora} is complete and can be used. It has no score and no sample"
            f" images yet. To add them without training again: {again}"
        )
    if not order.config.checkpoint.save_state:
        kept = "its LoRA is in the folder weights, for a new run with lora.network_weights"
        return f"stopped at step {record.steps}; it cannot be resumed (checkpoint.save_state=false): {kept}"
    return f"stopped at step {record.steps}; everything up to it is saved. To resume: {again}"


def lora_line(report: LoraReport) -> str:
    """`LoRA: passed; 41 of 48 samples show it; …`, the parts with the least scores first."""
    counted_parts = [part for part in report.parts.values() if part.measure is not None and part.measure.of is not None]
    rates = [
        WORDS[part.name].unit.format(f"{part.measure.count} of {part.measure.of}")
        for part in sorted(counted_parts, key=lambda part: part.scores)
        if part.measure is not None
    ]
    return "; ".join([f"LoRA: {report.outcome}", *rates])


def readers(lora: Path) -> str:
    """The programs that generate images with a LoRA file, as in `inspect`: `ComfyUI, A1111, Forge`."""
    found = [each.name for each in _clients(lora) if each.reads in ("whole", "in part")]
    return ", ".join(name for name in found if name not in ("diffusers", "sd-scripts")) or "other programs"


def _clients(lora: Path) -> list[Client]:
    """Nothing of a file that cannot be read."""
    from lora_trainer.models.lora_clients import clients
    from lora_trainer.models.lora_names import inspect_lora

    try:
        return clients(inspect_lora(lora))
    except UserError:
        return []
