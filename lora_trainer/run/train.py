"""A whole run: check the data, choose for the hardware, cache, train, validate, export, record."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from lora_trainer.config.options import suited
from lora_trainer.core.disk import FULL, Patience, patient, refusal, write_with_retry
from lora_trainer.core.errors import (
    BUG,
    DONE,
    INTERRUPTED,
    LORA_REFUSED,
    TRAINING_FAILED,
    DatasetRefused,
    LoraRefused,
    Problem,
    UsageError,
    UserError,
    gathering,
    is_out_of_memory,
)
from lora_trainer.core.hardware import package_versions
from lora_trainer.core.imports import importing
from lora_trainer.core.interrupt import listening, remembering, signal_that_came, stopping_on_signal
from lora_trainer.core.io import append_text, remove_unfinished, write_text
from lora_trainer.core.launch import is_main_process, processes_here
from lora_trainer.dataset_check.doubts import NOT_COMPARED, CaptionAgreement
from lora_trainer.models.families import FAMILIES
from lora_trainer.monitor.tracker_kinds.interface import RunEnding, TrackedRun
from lora_trainer.report.read import checkpoints_in
from lora_trainer.run.bases.encoder import find_encoder
from lora_trainer.run.bases.find import find_base, named_absolutely, on_stderr, silent
from lora_trainer.run.caption_agreement import CaptionExaminer
from lora_trainer.run.differences import differences, find_differences
from lora_trainer.run.ending_command import COMMANDS, show_commands, then_command, wrong_commands
from lora_trainer.run.folder import (
    asks_for_more,
    claim,
    ended_early,
    free_reserve,
    leave_as_found,
    locked_folder,
    wrong_scratch,
)
from lora_trainer.run.inputs import (
    Inputs,
    arithmetic,
    data_in_use,
    dataset_facts,
    read_inputs,
    read_model,
    with_absolute_paths,
)
from lora_trainer.run.lost_files import lost_loras
from lora_trainer.run.messages import announce, describe_stop, show_end, show_report
from lora_trainer.run.order import Order, plain_console, run_folder
from lora_trainer.run.other_programs import with_copy, with_files_for_programs, wrong_copy_to
from lora_trainer.run.settings import refuse_guidance, refuse_unchecked, refuse_unmeasured, with_installed_libraries
from lora_trainer.run_folder.lock import LOCK
from lora_trainer.run_folder.progress import Progress, ProgressFile
from lora_trainer.run_folder.record import RECORD, SHOWN_EVENTS, Record, Status, latest

if TYPE_CHECKING:  # torch is loaded after the data is checked
    from lora_trainer.config.layers import Resolved
    from lora_trainer.evaluation.lora_report import LoraReport
    from lora_trainer.models.family import Family, ModelFacts
    from lora_trainer.run.after_training import Outcome


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `record` is what its `run.json` says; None after a dry run."""

    folder: Path
    record: Record | None
    exit_code: int

    def __repr__(self) -> str:
        """The result in a line, as a notebook shows it; `record` has thousands of characters."""
        status = None if self.record is None else self.record.status
        scores = ", ".join(f"{name} {value}" for name, value in self.scores.items())
        return f"RunResult({str(self.folder)!r}, {status}, scores: {scores or 'none'}, exit code {self.exit_code})"

    @property
    def scores(self) -> dict[str, float | None]:
        """`dataset` and `lora`, in [0, 1]."""
        return {} if self.record is None else self.record.scores

    @property
    def files(self) -> dict[str, Path]:
        """What was written: `kohya`, `diffusers`, `report`."""
        if self.record is None:
            return {}
        return {name: self.folder / file for name, file in self.record.files.items() if file is not None}


@listening()
@data_in_use()
def train(order: Order, *, dry_run: bool = False) -> RunResult:
    """Train one LoRA.

    Raises UserError for everything a user can fix; what was trained until then is saved and recorded.
    """
    folder, console, enforce_gates = order.folder, order.console, order.enforce_gates
    if enforce_gates:
        refuse_unmeasured(order.config.gates)
    refuse_unchecked(order.resolved)
    order = startable(order)
    resolved = order.resolved
    announce(resolved.config, console)
    show_commands(resolved, console)
    found = claim(order, only_looks=dry_run)
    lost = lost_files(order, found, dry_run=dry_run) if found is not None and found.is_finished else {}
    is_over = found is not None and found.is_finished and not lost
    if found is not None and is_over and not asks_for_more(order, found):
        return nothing_to_do(order, found, dry_run=dry_run)
    find_encoder(resolved.config, weights=False, say=silent)
    order.watch(Progress("checking"))
    order, model = for_its_model(order)
    # The built-in images are known to suit their captions; a run that began was compared then. Jobs of a batch share
    # their base model in memory, which this would read once more for each.
    is_new = found is None and bool(order.config.data.sources) and order.config.gates.captions
    compares = enforce_gates and is_new and order.families is FAMILIES and processes_here() == 1
    agreement = NOT_COMPARED
    if found is not None:
        with suppress(ValidationError):  # a record of an earlier version, or a damaged one
            kept = found.dataset.get("caption_agreement")
            agreement = TypeAdapter(CaptionAgreement).validate_python(kept)
    measures = compares and not dry_run
    examiner = CaptionExaminer(order.config, agreement, before_run=True, measures=measures)
    inputs = read_inputs(order.config, model, examiner)
    inputs = replace(inputs, report=replace(inputs.report, agreement=examiner.agreement))
    show_report(order.config, inputs, console, verbose=order.verbose)
    if measures and examiner.agreement is not NOT_COMPARED:
        console.print(f"  {examiner.agreement.line}")
    if compares and dry_run:
        console.print("  captions and images: compared before a run, not in a dry run, so the score can be lower then")
    if dry_run:
        if found is not None and is_over and total_steps(order, inputs) <= found.steps:
            refuse_data(inputs, enforce_gates=enforce_gates)
            return nothing_to_do(order, found, dry_run=True)
        show_dry_run(order, inputs, enforce_gates=enforce_gates)
        return RunResult(folder, None, DONE)
    with then_command(order) as ended:
        refuse_data(inputs, enforce_gates=enforce_gates)
        inputs = with_weights(order, inputs)  # not downloaded for refused data
        if found is not None and is_over and total_steps(order, inputs) <= found.steps:
            return nothing_to_do(order, found)
        result = run_recorded(order, inputs)
        if result.record is not None:
            ended(result.record)
        return result


def show_dry_run(order: Order, inputs: Inputs, *, enforce_gates: bool, trains: bool = True) -> None:
    """Print what a run would do. Raises UserError for what it is refused for before its first step, in its order."""
    from lora_trainer.run.dry_run import refuse_plan, show_plan

    plan = show_plan(order, inputs) if inputs.train else None  # a refused dataset's plan is worth seeing too
    refuse_data(inputs, enforce_gates=enforce_gates)
    if plan is not None:
        refuse_plan(order, plan, trains=trains)


def lost_files(order: Order, record: Record, *, dry_run: bool) -> dict[str, str]:
    """The LoRA files of a finished run that are missing or damaged, printed: they are exported again from its checkpoints.

    Raises UsageError where there is none.
    """
    lost = lost_loras(order.folder, record)
    if not lost:
        return lost
    found = "; ".join(f"{name} {wrong}" for name, wrong in lost.items())
    if not checkpoints_in(order.folder / "checkpoints") or not record.keeps_state:
        message = f"{order.folder} is finished, but {found}, and it has no checkpoint to export the LoRA from."
        raise UsageError(
            Problem("export_not_possible", message, "Copy the file back, or train again under another --name.")
        )
    will = "would be" if dry_run else "is"
    order.console.print(
        f"{order.folder} is finished, but {found}: the LoRA {will} exported again from the last checkpoint."
    )
    return lost


def startable(order: Order) -> Order:
    """The order with settings for the libraries that are installed; what changes is printed.

    Raises UsageError for all that this machine lacks and that is known without the data and the model.
    """
    config = order.config
    problems = [
        *wrong_commands(config.run),
        *wrong_scratch(config.checkpoint.scratch),
        *wrong_copy_to(config.run.copy_to),
    ]
    resolved = order.resolved
    with gathering(problems):
        resolved = with_installed_libraries(resolved)
    if problems:
        raise UsageError(problems)
    for note in resolved.notes[len(order.resolved.notes) :]:
        order.console.print(note)
    return replace(order, resolved=resolved)


def nothing_to_do(order: Order, record: Record, *, dry_run: bool = False) -> RunResult:
    """Report a resumed run that is already finished; the exit code is the gate's, where it refused the LoRA."""
    status, steps = record.status, record.steps
    if is_main_process() and not dry_run:
        remove_unfinished(order.folder)  # the report was being written when the run was killed
        write_missing_report(order, record)
    if record.status == "done" and order.config.run.copy_to and is_main_process() and not dry_run:
        record = with_copy(order, record)
        if record.copied_to is not None:
            record = finish(order, with_files_for_programs(order, record))  # they name the copy
            order.console.print(f"copied to {record.copied_to}", markup=False, soft_wrap=True)
    if ended_early(order, record):
        order.console.print(
            f"{order.folder} stopped early at step {steps}: {record.reason}. Nothing to do."
            " To continue, set a higher safeguards.patience."
        )
        return RunResult(order.folder, record, record.exit_code or DONE)
    order.console.print(
        f"{order.folder} is finished (status {status}, step {steps}). Nothing to do."
        f" To continue, add --max-steps with more than {steps}."
    )
    return RunResult(order.folder, record, record.exit_code or DONE)


def write_missing_report(order: Order, record: Record) -> None:
    """Write the report of a finished run again where its record names one that is not there."""
    from lora_trainer.report import FILE, write_report

    if record.files["report"] and not (order.folder / FILE).is_file():
        try:
            write_report(order.folder)
        except Exception as error:  # noqa: BLE001  a report must not change how a run ends
            order.console.print(f"{FILE} could not be written: {type(error).__name__}: {error}")


def total_steps(order: Order, inputs: Inputs) -> int:
    return arithmetic(order.config, inputs.train, order.config.train.effective_batch_size, processes=1).total


@listening()
@data_in_use()
def cache(resolved: Resolved, *, dry_run: bool = False) -> None:
    """Cache latents and text embeddings for a run with these settings, and train nothing. Raises UserError."""
    order = Order(resolved, run_folder(resolved.config), plain_console())
    announce(order.config, order.console)
    order, model = for_its_model(order)
    inputs = read_inputs(order.config, model)
    show_report(order.config, inputs, order.console)
    if dry_run:
        show_dry_run(order, inputs, enforce_gates=False, trains=False)
        return
    refuse_data(inputs, enforce_gates=False)
    inputs = with_weights(order, inputs)
    from lora_trainer.data.caches.sharing import in_use
    from lora_trainer.run.caching import cache_folder
    from lora_trainer.run.session import fill, open_session, with_generated_images

    safe = "The entries cached so far are kept."
    patience = Patience(order.config.checkpoint.wait_minutes, order.console.print, lambda: safe)
    with patient(patience), in_use(cache_folder(order.config)):
        fill(with_generated_images(open_session(order, inputs)))


def for_its_model(order: Order) -> tuple[Order, tuple[Family, ModelFacts]]:
    """The order without preset options that its model does not support, which are printed; and the model.

    Raises UserError.
    """
    suits = partial(suited, order.resolved)
    family, facts = read_model(order.config, order.families, weights=False, suits=suits)
    refuse_guidance(order.resolved, family, facts)
    resolved = suits(facts.prediction)
    for note in resolved.notes[len(order.resolved.notes) :]:
        order.console.print(note)
    return replace(order, resolved=resolved), (family, facts)


def with_weights(order: Order, inputs: Inputs) -> Inputs:
    """The inputs, with a model whose weights are downloaded. Raises UsageError."""
    if inputs.facts.whole:
        # Only for what it refuses: weights that cannot be read here.
        find_base(order.config.model, offline=order.config.run.offline, say=silent)
        return inputs
    say = silent if order.console.quiet else on_stderr
    return replace(inputs, facts=read_model(order.config, order.families, say=say)[1])


def refuse_data(inputs: Inputs, *, enforce_gates: bool) -> None:
    """Raise DatasetRefused for data that cannot be trained on, or, with gates, that scores too low."""
    report = inputs.report
    if report.refusals:
        raise DatasetRefused(report.refusals, report)
    if enforce_gates and not report.passed:
        raise DatasetRefused(
            Problem(
                "dataset_score_low",
                f"The dataset scores {report.score:.2f}, below the minimum of {report.gate:.2f}.",
                "`lora-trainer check` shows what to fix; --set gates.dataset=… changes the minimum.",
            ),
            report,
        )


def run_recorded(order: Order, inputs: Inputs) -> RunResult:
    """Run the session and write a correct `run.json`, however it ends."""
    with importing():
        from lora_trainer.run.libraries import import_libraries

        import_libraries(order.config)
        from lora_trainer.data.caches.sharing import in_use
        from lora_trainer.monitor.memory import set_allocator
        from lora_trainer.monitor.tracker_thread import TrackerThreads
        from lora_trainer.run.caching import cache_folder
        from lora_trainer.run.room import patience_of
        from lora_trainer.run.run import run_session
        from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, step_of
        from lora_trainer.training.checkpoints.scratch import take_over
        from lora_trainer.training.determinism import only_deterministic
        from lora_trainer.training.processes import join_processes

    began, folder = time.monotonic(), order.folder
    set_allocator(expandable=order.config.memory.expandable_segments)  # before CUDA is initialized
    # All processes must find the folder free before one of them claims it.
    processes = join_processes(order.config.train.process_timeout_minutes)
    processes.wait()
    # A signal ends only the session; the record is written before and after it.
    with (
        locked_folder(order) as lock_again,
        ProgressFile(folder if is_main_process() else None) as progress_file,
        patient(patience_of(order)) as patience,
        remembering(),
    ):
        patience.keep(LOCK, lock_again)
        order = replace(order, watch=progress_file.also(order.watch))
        if order.resume and is_main_process():
            take = partial(take_over, folder / "checkpoints", order.console.print)
            write_with_retry("what a killed session left in its scratch folder", folder, take)
        processes.wait()  # all start from the same checkpoint
        previous, before = Record.read(folder), list_checkpoints(folder / "checkpoints")
        record = first_record(order, inputs, previous)
        order = replace(order, differences=find_differences(order, previous, record))
        threads = TrackerThreads(order.config.run.trackers if is_main_process() else (), tracked_run(order, record))
        keep(folder, record)
        try:
            exactly = only_deterministic(order.config.train.deterministic, folder / "checkpoints")
            with stopping_on_signal(), in_use(cache_folder(order.config)), exactly:
                outcome = run_session(order, inputs, record, threads)
        except BaseException as error:
            trained = list_checkpoints(folder / "checkpoints")
            if isinstance(error, UsageError) and trained == before:
                if is_main_process():
                    threads.finish(RunEnding("failed", error.exit_code))
                    progress_file.close()
                    leave_as_found(folder, previous)
                raise
            record = replace(latest(folder, record), steps=step_of(trained[0]) if trained else 0)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                order.console.print(describe_stop(order, record))
                record_signal(order, record)
            try:
                ended = finish(order, ended_by(error, record).with_seconds(total=time.monotonic() - began))
                threads.finish(tracked_ending(folder, ended))
            except (OSError, UserError) as refused:  # the error that ended the run is the one to raise
                order.console.print(f"{RECORD} could not be written: {refused}")
            raise
        try:
            return conclude(order, outcome, time.monotonic() - began)
        finally:
            threads.finish(tracked_ending(folder, latest(folder, outcome.record)))


def tracked_run(order: Order, record: Record) -> TrackedRun:
    """What the run's trackers know of it."""
    section = order.config.run
    # A command often has a secret, such as a webhook's address.
    own = {key: value for key, value in record.config["run"].items() if key not in COMMANDS}
    return TrackedRun(
        order.folder.name,
        order.folder,
        section.tracker_project,
        {**record.config, "run": own},
        record.origins,
        resumed=order.resume,
        offline=section.offline,
        uploads_files=section.log_artifacts,
        wait_seconds=section.tracker_wait_seconds,
        say=order.console.print,
    )


def tracked_ending(folder: Path, record: Record) -> RunEnding:
    """How the run ended, for its trackers; the files only of one that was not stopped, which has more time."""
    named = [*record.files.values(), *record.weights, *record.samples]
    files = [folder / name for name in dict.fromkeys(named) if name and (folder / name).is_file()]
    shown = [
        path for recipe in record.samples for path in sorted((folder / recipe).parent.glob(f"{Path(recipe).stem}*.png"))
    ]
    files = [] if record.status == "stopped" else [*files, *(path for path in shown if path not in files)]
    return RunEnding(record.status, record.exit_code or 0, record.scores, files)


def record_signal(order: Order, record: Record) -> None:
    """Log a signal that ended a session outside of its training loop. A disk that refuses loses only this event."""
    from lora_trainer.monitor.events import Event
    from lora_trainer.monitor.trackers import EVENTS

    number = signal_that_came()
    if number is None or not is_main_process():
        return
    event = Event(record.steps, "signal", f"{signal.Signals(number).name}: stopped at once, outside of training")
    with suppress(OSError):
        append_text(order.folder / EVENTS, json.dumps(event.to_json()) + "\n")


def conclude(order: Order, outcome: Outcome, seconds: float) -> RunResult:
    """Record and print how a session ended. Raises LoraRefused for a LoRA below an enforced gate."""
    folder, report = order.folder, outcome.lora
    record = outcome.record.with_seconds(total=seconds)
    if outcome.signal_exit is not None:
        record = replace(record, status="stopped", exit_code=outcome.signal_exit, reason="stopped by a signal")
        record = finish(order, record)
        order.console.print(describe_stop(order, record))
        return RunResult(folder, record, outcome.signal_exit)
    if report is None:  # not the main process
        return RunResult(folder, record, DONE)
    status = ending(order, report)
    refused = status != "done"
    mark(folder, status, report)
    code = LORA_REFUSED if refused else DONE
    record = replace(record, status=status, exit_code=code)
    if refused and record.reason is None:
        record = replace(record, reason=" ".join(report.reasons))
    if not refused:
        record = with_copy(order, record)
    record = finish(order, with_files_for_programs(order, record))
    show_end(record, report, folder, outcome.comparison, order.console)
    if refused:
        why = [each.fix for each in report.findings if each.fix and each.message in report.reasons]
        fixes = " ".join(dict.fromkeys(why))
        message = f"{' '.join(report.reasons)} It is kept in {folder}, marked as {status}."
        raise LoraRefused(Problem("lora_refused", message, fixes or "The report shows the samples."), report)
    return RunResult(folder, record, code)


def ending(order: Order, report: LoraReport) -> Status:
    """How a finished run ends: done, or refused or unresolved where the gates are enforced."""
    if not order.enforce_gates or report.outcome == "passed":
        return "done"
    if report.outcome == "refused":
        return "refused"
    accepted = report.outcome is None or order.config.gates.unresolved == "accept"
    return "done" if accepted else "unresolved"


def mark(folder: Path, status: Status, report: LoraReport) -> None:
    """Write a note next to a refused or unresolved file, which its name says, and remove an earlier note."""
    for earlier in {"refused", "unresolved"} - {status}:
        (folder / f"{folder.name}.{earlier}.txt").unlink(missing_ok=True)
    if status == "done":
        return
    note = folder / f"{folder.name}.{status}.txt"
    lines = [f"{folder.name}.safetensors is {report.outcome}. {' '.join(report.reasons)}"]
    lines += [f"{finding.severity}: {finding.message} {finding.fix}".rstrip() for finding in report.findings]
    text = "\n".join(lines) + "\n"
    write_with_retry(note.name, folder, lambda: write_text(note, text), len(text))


def keep(folder: Path, record: Record) -> None:
    """Write the record, from the main process only."""
    if is_main_process():
        record.write(folder)


def finish(order: Order, record: Record) -> Record:
    """Write the last record and its report, from the main process only; returns the record that was written.

    A report that cannot be written is printed and does not fail the run. A run stopped before its first step has none.
    """
    if not is_main_process():
        return record
    from lora_trainer.monitor.trackers import EVENTS, read_lines, record_pauses
    from lora_trainer.report import FILE, write_report

    drawn = sorted((order.folder / "samples").glob("*.json"))
    samples = tuple(path.relative_to(order.folder).as_posix() for path in drawn)
    free_reserve(order.folder)  # room for the record
    with suppress(OSError):  # the disk may be what ended the run
        record_pauses(order.folder, record.steps)
    weights = tuple(
        sorted(path.relative_to(order.folder).as_posix() for path in order.folder.glob("weights/*.safetensors"))
    )
    events = tuple(read_lines(order.folder / EVENTS)[-SHOWN_EVENTS:])
    shown = record.steps > 0 or record.status != "stopped"
    files = {**record.files, "report": FILE if shown else None}
    record = replace(record, files=files, samples=samples, weights=weights, events=events)
    record.write(order.folder)
    if not shown:
        return record
    try:
        write_report(order.folder)
    except Exception as error:  # noqa: BLE001  a report must not change how a run ends
        order.console.print(f"{FILE} could not be written: {type(error).__name__}: {error}")
        record = replace(record, files={**record.files, "report": None})
        record.write(order.folder)
    return record


def ended_by(error: BaseException, record: Record) -> Record:
    """The record of a run ended by an error or by a signal outside the loop, with the command's exit code."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else INTERRUPTED
        return replace(record, status="stopped", exit_code=code, reason="stopped by a signal")
    code, reason = BUG, f"{type(error).__name__}: {error}"
    if isinstance(error, UserError):
        code, reason = error.exit_code, str(error)
    elif is_out_of_memory(error):
        code, reason = TRAINING_FAILED, "Out of memory."
    elif isinstance(error, OSError) and refusal(error) in FULL:
        code, reason = TRAINING_FAILED, "The disk is full."
    return replace(record, status="failed", exit_code=code, reason=reason)


def first_record(order: Order, inputs: Inputs, earlier: Record | None) -> Record:
    """The record before training; the durations of earlier sessions and the last hardware are kept."""
    config = with_absolute_paths(order.config).model_dump(mode="json")
    versions = package_versions()
    before = earlier or Record(order.folder.name, sessions=0)
    return Record(
        name=order.folder.name,
        started=before.started or time.time(),
        config=config,
        origins=dict(order.resolved.origin),
        pinned=before.pinned,
        sessions=before.sessions + 1,
        gates_enforced=order.enforce_gates,
        scores={"dataset": round(inputs.report.score, 4), "lora": None},
        seconds=before.seconds,
        changed=differences(order, earlier, config, versions),
        versions=versions,
        hardware=before.hardware,
        arithmetic=before.arithmetic,
        data_hash=inputs.manifest.data_hash,
        model={"family": inputs.family.name, **named_absolutely(order.config.model)},
        dataset=dataset_facts(inputs),
    )
