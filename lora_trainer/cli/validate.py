"""`validate LORA`: the LoRA gate on a file."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from lora_trainer.config.schema import Config
from lora_trainer.core.errors import DONE, LORA_REFUSED, DatasetRefused, Problem, UsageError
from lora_trainer.core.findings import counted, printable_lines
from lora_trainer.core.tensorfile import METADATA, read_tensor_header
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Sample
from lora_trainer.data.views import BucketPlan, plan_plain
from lora_trainer.evaluation.report import LoraReport, caveat
from lora_trainer.monitor.console import Console
from lora_trainer.production.bases.base import describe_model, is_builtin
from lora_trainer.production.counting import JUDGED, counting
from lora_trainer.production.inputs import data_in_use, read_inputs, read_model, trained_framings
from lora_trainer.production.reading import Run, read_as_trained, run_beside

MEANINGS = {
    "integrity": "whole, finite, loads, changes images",
    "learning": "validation loss against the base, same noise",
    "preservation": "little drift on unrelated prompts",
    "health": "sizes of the updates, modules that learned",
}


@dataclass(frozen=True)
class Questions:
    """The images that learning is measured on, where each goes, and where they come from."""

    samples: tuple[Sample, ...]
    plan: BucketPlan
    unseen: bool
    origin: str


NO_QUESTIONS = BucketPlan(())


@data_in_use()
def validate_command(lora: str | Path, data: str | Path | None, as_json: bool, config: Config) -> int:
    """Judge a LoRA file; print the report. 0 when it passes `gates.lora`, 4 when it does not.

    Without `data`, the images that its run held out are taken from the `run.json` beside the
    file, and count as held out while the data is what it was; without that, and on the built-in
    base, those of the built-in dataset.
    Raises UsageError for a file, model or folder that cannot be read.
    """
    path = Path(lora)
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))) or "none"
        raise UsageError(Problem(f"{path} is a folder, not a LoRA file.", f"LoRA files in it: {inside}."))
    if not path.is_file():
        raise UsageError(Problem(f"There is no LoRA file {path}.", "Check the path."))
    header = read_tensor_header(path).get(METADATA, {})  # what is no LoRA is refused before a model is looked for
    run = run_beside(path)
    config = read_as_trained(config, None if run is None else run.config, header)
    _say(f"base model: {describe_model(config.model)}")
    questions = _given_questions(config, Path(data), run) if data is not None else _run_questions(config, run)
    _say(questions.origin)
    report = _judge(path, config, questions)
    if run is not None and run.unseen is not None:
        report = replace(report, findings=(*report.findings, run.unseen))
    if as_json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print_report(path, report)
    return DONE if report.passed else LORA_REFUSED


def _judge(path: Path, config: Config, questions: Questions) -> LoraReport:
    import torch

    from lora_trainer.evaluation.encode import EncodeTexts, encode_samples, text_reader
    from lora_trainer.evaluation.lora_check import LORA_CHECKS, check_lora, refused_unloaded
    from lora_trainer.evaluation.placing import with_less
    from lora_trainer.models.family import Encoders
    from lora_trainer.models.lora_files import read_lora_with_words
    from lora_trainer.production.choices import ENCODER_DTYPE, choose_precision, computed_in, usable_bytes

    family, facts = read_model(config)
    if report := refused_unloaded(read_lora_with_words(path), facts.path, family, config.gates.lora):
        return report
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def encoders() -> Encoders:  # each is loaded when it is first asked, as the run's caches were filled
        return family.load_encoders(facts.path, ENCODER_DTYPE, device)

    def texts() -> EncodeTexts:
        return text_reader(family, facts, ENCODER_DTYPE, device, usable_bytes(config, device))

    try:
        samples = encode_samples(questions.samples, questions.plan, encoders, texts, device)
    except DatasetRefused as refused:
        raise UsageError(refused.problems) from refused

    def judged(usable: int | None) -> LoraReport:
        with counting() as count:
            return check_lora(
                path,
                facts.path,
                family,
                samples,
                unseen=questions.unseen,
                dtype=computed_in(choose_precision(config.memory.weight_dtype, device, is_set=False).value, device),
                device=device,
                usable=usable,
                gate=config.gates.lora,
                share=LORA_CHECKS[config.gates.lora_check] or LORA_CHECKS["full"],  # what is asked for is measured
                progress=_say,
                watch=count(JUDGED),
            )

    return with_less(judged, usable_bytes(config, device), device, _say)


def _given_questions(config: Config, data: Path, run: Run | None) -> Questions:
    """The images of a folder. Those that the file's run trained on, by their contents, do not count as held out."""
    _, facts = read_model(config)
    manifest, findings = read_manifest([data], allow_missing_captions=True)
    _say(*(f"left out: {finding.path} {finding.message}" for finding in findings if finding.severity == "error"))
    plan = plan_plain(manifest.samples, trained_framings(config, facts)[:1])
    trained = _trained_contents(run)
    known = sum(sample.content in trained for sample in manifest.samples)
    origin = f"learning is measured on {counted(len(manifest.samples), 'image')} of {data}"
    if known:
        origin += f", of which the run that the file lies in trained on {known}"
    return Questions(manifest.samples, plan, known == 0, origin)


def _trained_contents(run: Run | None) -> set[str]:
    """Contents of the images that a run trained on, by its data as it lies there now; none where that cannot be read."""
    if run is None:
        return set()
    try:
        return {sample.content for sample in read_inputs(run.config).train}
    except (UsageError, DatasetRefused):
        return set()


def _run_questions(config: Config, run: Run | None) -> Questions:
    """What the run held out; on the built-in base without a run, what the built-in set holds out."""
    if run is None and not is_builtin(config.model):
        origin = "no --data and no run.json beside the file: learning cannot be measured"
        return Questions((), NO_QUESTIONS, True, origin)
    asked = {name: getattr(config, name) for name in ("model", "text_encoder", "textual_inversion")}
    trained_with = config if run is None else run.config.model_copy(update=asked)
    try:
        inputs = read_inputs(trained_with)
    except UsageError as error:
        return Questions((), NO_QUESTIONS, True, f"learning cannot be measured: {error}")
    origin = "the built-in dataset" if run is None else "the run's data"
    if run is not None and inputs.manifest.data_hash != run.data_hash:
        samples, plan = inputs.validation, inputs.validation_plan
        if not samples:
            samples, plan = inputs.train, inputs.train_plan
        told = f"the run's data has changed since: its {counted(len(samples), 'image')} may have been trained on"
        return Questions(samples, plan, False, f"{told}; name others with --data")
    if inputs.validation:
        told = f"learning is measured on {counted(len(inputs.validation), 'validation image')} of {origin}"
        return Questions(inputs.validation, inputs.validation_plan, True, told)
    return Questions(
        inputs.train, inputs.train_plan, False, f"nothing was held out: learning is measured on {origin} itself"
    )


def print_report(path: Path, report: LoraReport) -> None:
    """The report for people, on stdout."""
    console = Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report.parts.items():
        told = "says little" if name == "learning" and caveat(report.numbers) else ""  # why is among the findings
        meaning = "; ".join(filter(None, (MEANINGS.get(name, ""), told)))
        table.add_row(Text(f"  {name}"), f"{value:.2f}", Text(meaning, style="dim"))
    verdict = "passed" if report.passed else "refused"
    console.print(Text(f"{path.name}: score {report.score:.2f}, {verdict} (gate {report.gate:.2f})", style="bold"))
    console.print(table)
    for line in _numbers(report.numbers):
        console.print(Text(f"  {line}"), soft_wrap=not console.is_terminal)
    for finding in report.findings:
        console.print(
            Text(f"  {finding.severity}: {finding.message} {finding.fix}".rstrip()), soft_wrap=not console.is_terminal
        )


def _numbers(numbers: Any) -> list[str]:
    lines = []
    if learned := numbers.get("learning"):
        lines.append(
            f"validation loss {learned['base']:.4f} -> {learned['lora']:.4f}: {learned['mean']:.1%} lower "
            f"(95 % interval {learned['low']:.1%} to {learned['high']:.1%})"
        )
    if "drift" in numbers:
        lines.append(f"drift on unrelated prompts {numbers['drift']:.1%}")
    if health := numbers.get("health"):
        lines.append(f"largest update {health['largest']:.3f} of its weight, rank used {health['rank_used']:.0%}")
    return lines


def _say(*lines: str) -> None:
    for line in lines:
        print(printable_lines(line), file=sys.stderr)
