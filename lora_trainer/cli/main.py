"""The command `lora-trainer`: one function per command.

Commands import what they need when they run, so `--help`, `check` and `presets` stay
free of torch.
"""

from __future__ import annotations

import argparse
import errno
import io
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.builtin import DEMO_PROMPTS
from lora_trainer.cli.arguments import (
    EXAMPLES,
    Parser,
    add_debug_argument,
    add_offline_argument,
    add_run_arguments,
    add_settings_arguments,
    explained,
    layers_from,
    resolved_from,
    say,
    settled,
    unknown_arguments,
)
from lora_trainer.cli.average import EXAMPLES as AVERAGE_EXAMPLES
from lora_trainer.cli.average import add_average_arguments, average_command
from lora_trainer.cli.batch import EXAMPLES as BATCH_EXAMPLES
from lora_trainer.cli.batch import add_batch_arguments, batch_command
from lora_trainer.cli.bench import EXAMPLES as BENCH_EXAMPLES
from lora_trainer.cli.bench import add_bench_arguments, bench_command
from lora_trainer.cli.caption import EXAMPLES as CAPTION_EXAMPLES
from lora_trainer.cli.caption import add_caption_arguments, caption_command
from lora_trainer.cli.check_arguments import EXAMPLES as CHECK_EXAMPLES
from lora_trainer.cli.check_arguments import add_check_arguments, check
from lora_trainer.cli.convert import EXAMPLES as CONVERT_EXAMPLES
from lora_trainer.cli.convert import add_convert_arguments, convert_command
from lora_trainer.cli.doctor import EXAMPLES as DOCTOR_EXAMPLES
from lora_trainer.cli.doctor import add_doctor_arguments, doctor_command
from lora_trainer.cli.errors import report_error
from lora_trainer.cli.extract import EXAMPLES as EXTRACT_EXAMPLES
from lora_trainer.cli.extract import add_extract_arguments, extract_command
from lora_trainer.cli.imports import EXAMPLES as IMPORT_EXAMPLES
from lora_trainer.cli.imports import add_import_arguments, import_command
from lora_trainer.cli.inspect import EXAMPLES as INSPECT_EXAMPLES
from lora_trainer.cli.inspect import add_inspect_arguments, inspect_command
from lora_trainer.cli.merge_files import EXAMPLES as MERGE_EXAMPLES
from lora_trainer.cli.merge_files import add_merge_arguments, merge_command
from lora_trainer.cli.metrics import EXAMPLES as METRICS_EXAMPLES
from lora_trainer.cli.metrics import add_metrics_arguments, metrics_command
from lora_trainer.cli.models import EXAMPLES as MODELS_EXAMPLES
from lora_trainer.cli.models import add_models_arguments, models_command
from lora_trainer.cli.plan import EXAMPLES as PLAN_EXAMPLES
from lora_trainer.cli.plan import add_plan_arguments, plan_command
from lora_trainer.cli.profile import EXAMPLES as PROFILE_EXAMPLES
from lora_trainer.cli.profile import add_profile_arguments, profile_command
from lora_trainer.cli.request import EXAMPLES as REQUEST_EXAMPLES
from lora_trainer.cli.request import add_request_arguments, request_command
from lora_trainer.cli.resize import EXAMPLES as RESIZE_EXAMPLES
from lora_trainer.cli.resize import add_resize_arguments, resize_command
from lora_trainer.cli.sample_arguments import EXAMPLES as SAMPLE_EXAMPLES
from lora_trainer.cli.sample_arguments import add_sample_arguments, sample
from lora_trainer.cli.search import EXAMPLES as SEARCH_EXAMPLES
from lora_trainer.cli.search import add_search_arguments, search_command
from lora_trainer.cli.ui import EXAMPLES as UI_EXAMPLES
from lora_trainer.cli.ui import add_ui_arguments, ui_command
from lora_trainer.config.layers import Layer, Resolved
from lora_trainer.core.errors import DONE, INTERRUPTED, WRONG_USAGE, Problem, UsageError, nearest
from lora_trainer.core.interrupt import Stopped, code_of_signal, listening
from lora_trainer.core.quiet import quieten_libraries
from lora_trainer.core.terminal import lost_output, outlive_readers
from lora_trainer.core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUTPUT_LOST = 1  # of a command whose result is what it prints
# What Windows calls a pipe whose reader is gone.
READER_GONE = (errno.EPIPE, errno.EINVAL)


@dataclass(frozen=True)
class Command:
    """`run` takes the parsed arguments and a problem for each unknown one, and returns the exit code.

    `only_prints`: without its output the command was in vain.
    """

    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, list[Problem]], int]
    examples: str = ""
    only_prints: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; user errors are printed without a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    outlive_readers()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name that the console cannot show must not end a run; JSON has the same escapes.
            stream.reconfigure(errors="backslashreplace")
    quieten_libraries()
    try:
        with listening():
            code = _parse(arguments)()
            sys.stdout.flush()
            if code == DONE and (lost := lost_output()) is not None:
                code = code_of_signal() or _code_without_output(arguments, lost)
        return code
    except Stopped as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        say("stopped")
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last place to report an error
        return report_error(error, debug="--debug" in arguments)


def _code_without_output(arguments: list[str], lost: OSError) -> int:
    """The exit code of a command that was done, but whose output is not complete."""
    if lost.errno not in READER_GONE:
        say(f"warning: a part of the output is lost ({(lost.strerror or str(lost)).lower()})")
    command = COMMANDS.get(arguments[0])
    # With --json its document is the result of any command.
    return OUTPUT_LOST if command is None or command.only_prints or "--json" in arguments else DONE


def _parse(arguments: list[str]) -> Callable[[], int]:
    """What the arguments ask for, to be called: a command, or its help. Raises UsageError."""
    overview = _overview()
    if not arguments:
        overview.print_help(sys.stderr)
        return lambda: WRONG_USAGE
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        if name in ("-h", "--help", "--version"):
            return partial(_parse_to_exit, overview, arguments)
        kind = "flag" if name.startswith("-") else "command"
        raise UsageError(Problem("unknown_command", f"Unknown {kind} {name}.", nearest(name, COMMANDS)))
    parser = Parser(
        prog=f"lora-trainer {name}",
        description=command.summary,
        epilog=command.examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    add_debug_argument(parser)
    if "-h" in rest or "--help" in rest:
        return partial(_parse_to_exit, parser, ["--help"])
    try:
        parsed, unknown = parser.parse_known_intermixed_args(rest)
    except UsageError as error:
        known = {flag for action in parser._actions for flag in action.option_strings}
        strange = [n for n, word in enumerate(rest) if word.startswith("--") and word.partition("=")[0] not in known]
        misspelt = [problem for n in strange for problem in unknown_arguments(parser, rest[n : n + 2])[:1]]
        raise UsageError([*misspelt, *error.problems]) from None
    return partial(command.run, parsed, unknown_arguments(parser, unknown))


def _parse_to_exit(parser: argparse.ArgumentParser, arguments: list[str]) -> int:
    """Let argparse print its help or version, and return instead of leaving the process."""
    try:
        parser.parse_args(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def _overview() -> Parser:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{command.summary}" for name, command in COMMANDS.items()]
    parser = Parser(
        prog="lora-trainer",
        usage="lora-trainer COMMAND [ARGUMENTS]",
        description="Train LoRAs for diffusion models, and score the dataset and every LoRA.\n\ncommands:\n"
        + "\n".join(lines),
        epilog="lora-trainer COMMAND --help shows a command's arguments and examples.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"lora-trainer {__version__}")
    return parser


# Commands


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    text = "print more details, such as the attention backend of a CPU"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)


def _train(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    return _run(arguments, resolved_from(arguments, unknown), enforce_gates=False)


def _produce(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    return _run(arguments, resolved_from(arguments, unknown), enforce_gates=True)


def _demo(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    """The built-in example in a folder of its own: `demo`, then `demo-2`, …"""
    if vars(arguments)["run.name"] is None and not arguments.resume:
        output = Path(vars(arguments)["run.output"] or "runs")
        numbered = ["demo", *(f"demo-{number}" for number in range(2, 10_000))]
        vars(arguments)["run.name"] = next(name for name in numbered if not (output / name).exists())
    problems = list(unknown)
    presets, user = layers_from(arguments, problems, presets_if_none=["12gb"])
    # A miniature draws roughly: that some of its images have faults is said, and no reason to fail.
    own = Layer(
        "demo",
        {
            "captions": {"trigger_word": "pomo"},
            "sample": {"prompts": DEMO_PROMPTS},
            "gates": {"unresolved": "accept"},
        },
    )
    return _run(arguments, settled(presets, [own, *user], problems), enforce_gates=True)


def _run(arguments: argparse.Namespace, resolved: Resolved, *, enforce_gates: bool) -> int:
    if explained(arguments, resolved):
        return DONE
    from lora_trainer.run.order import make_order
    from lora_trainer.run.train import train

    order = make_order(resolved, resume=arguments.resume, enforce_gates=enforce_gates, verbose=arguments.verbose)
    return train(order, dry_run=arguments.dry_run).exit_code


def _add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        metavar="status|prune",
        help="describe or prune the caches (default: cache latents and text embeddings)",
    )
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", type=Path, help="the cache folder (default: that of your user)"
    )
    parser.add_argument("--limit-gb", type=float, metavar="GB", help="prune: keep at most this much (50)")
    parser.add_argument("--verify", action="store_true", help="prune: read everything and verify every checksum")
    parser.add_argument("--json", action="store_true", help="status: one JSON document on stdout")
    add_run_arguments(parser, hidden=("--output", "--name", "--max-steps", "--max-hours", "--resume", "--profile"))


def _cache(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    resolved = resolved_from(arguments, unknown)
    for name, action in (("limit_gb", "prune"), ("verify", "prune"), ("json", "status")):
        if vars(arguments)[name] not in (None, False) and arguments.action != action:
            problem = Problem(
                "flag_not_for_command", f"--{name.replace('_', '-')} is for cache {action}.", "Leave it out."
            )
            raise UsageError(problem)
    folder = arguments.folder or (Path(resolved.config.cache.dir) if resolved.config.cache.dir else None)
    if arguments.action is None:
        if explained(arguments, resolved):
            return DONE
        from lora_trainer.run.train import cache

        cache(resolved, dry_run=arguments.dry_run)
        return DONE
    from lora_trainer.cli.cache import prune_command, status_command

    if arguments.action == "status":
        return status_command(folder, arguments.json)
    if arguments.action == "prune":
        return prune_command(folder, arguments.limit_gb, verify=arguments.verify)
    raise UsageError(
        Problem("unknown_action", f"Unknown action {arguments.action}.", nearest(arguments.action, ["status", "prune"]))
    )


def _add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lora", metavar="LORA", nargs="?", help="the LoRA file, in kohya's or diffusers' format, or a run's folder"
    )
    parser.add_argument(
        "--model",
        dest="model.path",
        metavar="MODEL",
        help="the base model, as for train (default: that of the run beside the file, else the built-in one)",
    )
    parser.add_argument(
        "--samples",
        metavar="DIR",
        help="in place of LORA, images that another program drew with it, each NAME.png with its prompt in NAME.txt",
    )
    parser.add_argument(
        "--unrelated", metavar="DIR", help="with --samples, images of prompts that are not about the dataset"
    )
    parser.add_argument(
        "--data",
        dest="validation",
        metavar="DIR",
        help="its training images (default: those of the run beside the file)",
    )
    parser.add_argument(
        "--compare",
        choices=("strengths", "checkpoints", "both"),
        help="advise which strength, or which of the run's kept checkpoints, to use",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    add_offline_argument(parser)
    add_settings_arguments(parser)


def _validate(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    from lora_trainer.run.reading import lora_of

    if arguments.samples is not None:
        return _validate_samples(arguments, unknown)
    if arguments.unrelated is not None:
        raise UsageError(Problem("arguments_conflict", "--unrelated needs --samples.", "Name both, or neither."))
    if arguments.lora is None:
        fix = "lora-trainer validate FILE, or --samples DIR --data DATA for images of another program."
        raise UsageError(Problem("argument_missing", "No LoRA file is named.", fix))
    lora = lora_of(Path(arguments.lora))
    extra = [Layer("--compare", {"gates": {"compare": arguments.compare}})] if arguments.compare else []
    resolved = resolved_from(arguments, unknown, lora=lora, extra=extra)
    from lora_trainer.cli.validate import validate_command

    return validate_command(lora, arguments.validation, arguments.json, resolved.config)


def _validate_samples(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    if arguments.lora is not None or arguments.compare is not None or arguments.validation is None:
        message = "--samples takes the place of LORA, needs --data, and does not go with --compare."
        fix = "lora-trainer validate --samples DIR --data DATA --model MODEL"
        raise UsageError(Problem("arguments_conflict", message, fix))
    resolved = resolved_from(arguments, unknown)
    from lora_trainer.cli.validate import say, show
    from lora_trainer.run.judge_folder import judge_images

    samples, data = Path(arguments.samples), Path(arguments.validation)
    unrelated = None if arguments.unrelated is None else Path(arguments.unrelated)
    return show(samples, judge_images(samples, data, unrelated, resolved.config, say), as_json=arguments.json)


def _add_report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, or of several runs; several are compared"
    )
    parser.add_argument(
        "--output",
        dest="page",
        metavar="FILE",
        help="the page to write (default: report.html in the run's folder; comparison.html beside the first of several)",
    )


def _report_again(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    if unknown:
        raise UsageError(unknown)
    from lora_trainer.cli.report import report_command

    return report_command(arguments.runs, arguments.page)


def _add_presets_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", metavar="show", help="show the merged settings of the presets named")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 12gb quality")


def _presets(arguments: argparse.Namespace, unknown: list[Problem]) -> int:
    from lora_trainer.cli.presets import presets_command

    return presets_command(arguments, unknown)


COMMANDS = {
    "train": Command("train one LoRA and score it", _add_train_arguments, _train, EXAMPLES),
    "produce": Command(
        "train, but refuse a dataset or LoRA that is not good enough",
        _add_train_arguments,
        _produce,
        EXAMPLES.replace(" train ", " produce "),
    ),
    "batch": Command(
        "train one LoRA for each folder of images below a folder", add_batch_arguments, batch_command, BATCH_EXAMPLES
    ),
    "search": Command(
        "search the best settings with Optuna, or test learning rates",
        add_search_arguments,
        search_command,
        SEARCH_EXAMPLES,
    ),
    "demo": Command(
        "train the built-in example, in minutes, without a GPU",
        _add_train_arguments,
        _demo,
        "example:\n  lora-trainer demo\n\nIt uses the preset 12gb, and fails if the LoRA is refused.\n",
    ),
    "check": Command(
        "score a dataset and list the problems of its files",
        add_check_arguments,
        check,
        CHECK_EXAMPLES,
    ),
    "cache": Command(
        "cache latents and text embeddings, or describe or prune the caches",
        _add_cache_arguments,
        _cache,
        "examples:\n  lora-trainer cache --data ./images --model ./my-sd15\n"
        "  lora-trainer cache status\n  lora-trainer cache prune --limit-gb 20\n",
    ),
    "plan": Command(
        "predict memory, disk space, steps and time, without a GPU",
        add_plan_arguments,
        plan_command,
        PLAN_EXAMPLES,
        only_prints=True,
    ),
    "models": Command(
        "list base models, what fits this GPU and what is here; download one",
        add_models_arguments,
        models_command,
        MODELS_EXAMPLES,
    ),
    "validate": Command(
        "score a LoRA file: passed, refused or unresolved, and why",
        _add_validate_arguments,
        _validate,
        "example:\n  lora-trainer validate runs/cat/cat.safetensors --model ./my-sd15\n",
    ),
    "sample": Command(
        "generate images without and with a LoRA, as one grid",
        add_sample_arguments,
        sample,
        SAMPLE_EXAMPLES,
    ),
    "inspect": Command(
        "show what a LoRA file contains and which programs read it",
        add_inspect_arguments,
        inspect_command,
        INSPECT_EXAMPLES,
        only_prints=True,
    ),
    "convert": Command(
        "convert a LoRA file to another program's format, exactly",
        add_convert_arguments,
        convert_command,
        CONVERT_EXAMPLES,
    ),
    "merge": Command(
        "merge LoRA files with weights, or merge them into a base model",
        add_merge_arguments,
        merge_command,
        MERGE_EXAMPLES,
    ),
    "resize": Command(
        "lower the ranks of a LoRA file, layer by layer, by SVD",
        add_resize_arguments,
        resize_command,
        RESIZE_EXAMPLES,
    ),
    "extract": Command(
        "extract a LoRA from a base model and a model trained from it",
        add_extract_arguments,
        extract_command,
        EXTRACT_EXAMPLES,
    ),
    "average": Command(
        "average LoRA files, or the checkpoints of a run",
        add_average_arguments,
        average_command,
        AVERAGE_EXAMPLES,
    ),
    "request": Command(
        "ask a run that trains to save, generate images, or use other prompts",
        add_request_arguments,
        request_command,
        REQUEST_EXAMPLES,
    ),
    "report": Command(
        "write a run's HTML report again, or compare several runs",
        _add_report_arguments,
        _report_again,
        "examples:\n  lora-trainer report runs/cat\n  lora-trainer report runs/cat runs/cat-2 --output cats.html\n"
        "  lora-trainer report runs  # the newest 12, and why runs failed\n",
    ),
    "metrics": Command(
        "serve the newest numbers of all runs on this computer to Prometheus",
        add_metrics_arguments,
        metrics_command,
        METRICS_EXAMPLES,
    ),
    "ui": Command(
        "a page in the browser, and REST, to start, watch and stop runs",
        add_ui_arguments,
        ui_command,
        UI_EXAMPLES,
    ),
    "profile": Command(
        "show in words where a run's time went, and what to try",
        add_profile_arguments,
        profile_command,
        PROFILE_EXAMPLES,
        only_prints=True,
    ),
    "bench": Command(
        "measure training steps, data loading, memory and more",
        add_bench_arguments,
        bench_command,
        BENCH_EXAMPLES,
    ),
    "doctor": Command(
        "check this machine, and a run before, during or after training",
        add_doctor_arguments,
        doctor_command,
        DOCTOR_EXAMPLES,
        only_prints=True,
    ),
    "caption": Command(
        "write captions or tags for images with a local model",
        add_caption_arguments,
        caption_command,
        CAPTION_EXAMPLES,
    ),
    "import": Command(
        "convert a config of kohya, OneTrainer, ai-toolkit and others",
        add_import_arguments,
        import_command,
        IMPORT_EXAMPLES,
        only_prints=True,
    ),
    "presets": Command(
        "list the presets, or show their settings",
        _add_presets_arguments,
        _presets,
        "examples:\n  lora-trainer presets\n  lora-trainer presets show 12gb quality\n",
        only_prints=True,
    ),
}
