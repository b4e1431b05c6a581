"""What the page may ask of the tools for LoRA files: checked with all problems at once, then a command that runs as a task."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.core.errors import Problem
from lora_trainer.core.findings import counted
from lora_trainer.lora_format.kinds import EXTRACTED, KINDS, LORA
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.bases.names import as_hub_part
from lora_trainer.run_folder.record import RECORD
from lora_trainer.web.asked_settings import Text
from lora_trainer.web.lora_list import ENDING, LIBRARY, TOKENS, id_of_lora
from lora_trainer.web.run_list import folder_of
from lora_trainer.web.safety import Refusal, allowed
from lora_trainer.web.server_state import ServerState

KIND = "lora-tool"  # of the tasks
NAME = re.compile(r"\w[\w .,()+=-]{0,119}")
PLAIN, MOST_RANK, MOST_FILES = "LoRA", 4096, 32
COUNTS = {  # how many files each tool takes
    "convert": (1, 1),
    "resize": (1, 1),
    "merge": (1, MOST_FILES),
    "average": (2, MOST_FILES),
    "extract": (0, 0),
}
OPTIONS = {  # what each tool takes beside its files
    "convert": ("to", "rank", "model", "dtype", "family"),
    "resize": ("rank", "energy", "frobenius", "ratio", "to", "dtype", "family"),
    "merge": ("weights", "rank", "energy", "frobenius", "ratio", "to", "dtype", "family"),
    "average": ("weights", "run", "of", "decay", "rank", "to", "dtype", "family"),
    "extract": ("base", "tuned", "type", "rank", "frobenius", "to", "dtype"),
}
LIMITS = ("rank", "energy", "frobenius", "ratio")
FORMATS, LOWERED, COMFYUI = ("kohya", "diffusers"), "lora", "comfyui"
MODELS = ("model", "base", "tuned")
REWRITTEN_KINDS = [kind.title for kind in KINDS.values() if kind.rewritten]  # that ComfyUI computes in a way of its own
OVER_BASE = [
    kind.title for kind in KINDS.values() if kind.needs_weight
]  # kinds that change a weight which they do not hold


class AskedTool(BaseModel):
    """A tool with its files and options, named as the command's. `name` is that of the file in the library."""

    model_config = ConfigDict(extra="forbid")
    tool: Literal["convert", "merge", "resize", "average", "extract"]
    name: Annotated[str, Field(min_length=1, max_length=200)]
    loras: list[Annotated[str, Field(max_length=100)]] = Field([], max_length=MOST_FILES)
    run: Annotated[str, Field(max_length=600)] | None = None
    weights: list[float] | None = Field(None, max_length=MOST_FILES)
    rank: int | None = None
    energy: float | None = None
    frobenius: float | None = None
    ratio: float | None = None
    decay: float | None = None
    to: Literal["kohya", "diffusers", "lora", "comfyui"] | None = None
    dtype: Literal["fp16", "bf16", "fp32"] | None = None
    family: Annotated[str, Field(max_length=100)] | None = None
    of: Literal["updates", "parameters"] | None = None
    type: Annotated[str, Field(pattern=f"^({'|'.join((LORA, *EXTRACTED))})$")] | None = None
    model: Text | None = None
    base: Text | None = None
    tuned: Text | None = None


def start_tool(asked: AskedTool, state: ServerState) -> dict[str, Any]:
    """Start the task; its row. Raises Refusal with all problems, 409 where only the name is taken."""
    problems = list[Problem]()
    taken, target = target_of(asked.name, state, problems)
    known = {row["id"]: row for row in state.loras.rows()[0]} if asked.loras else {}
    rows = [known[each] for each in asked.loras if each in known]
    problems += [
        Problem("lora_missing", f"There is no LoRA {each}.", "Choose another.")
        for each in asked.loras
        if each not in known
    ]
    problems += [*option_problems(asked), *file_problems(asked, rows)]
    places = read_places(asked, state, problems)
    if problems or taken:
        raise Refusal(422 if problems else 409, [*problems, *taken])
    inputs = [row["path"] for row in rows]
    inputs += [places[each] for each in ("run", "base", "tuned") if each in places]
    arguments = [asked.tool, *inputs]
    if asked.weights is not None:
        # Options may follow a list, and an exponent would look like one.
        arguments += ["--weights", *(f"{weight:.6f}" for weight in asked.weights)]
    for option in OPTIONS[asked.tool]:
        value = places.get(option) or getattr(asked, option)
        if value is not None and option not in ("weights", "run", "base", "tuned"):
            arguments.append(f"--{option}={value}")
    target.parent.mkdir(parents=True, exist_ok=True)
    names = [row["name"] for row in rows] or [Path(each).name for each in inputs]
    about = {"tool": asked.tool, "loras": asked.loras, "names": names, "output": target.name}
    about |= {"lora": id_of_lora(target), "sizes": [row["size"] for row in rows]}
    title = f"{asked.tool} {', '.join(names)[:200]}"
    return state.tasks.start(KIND, title, [*arguments, f"--output={target}", "--json"], about)


def target_of(name: str, state: ServerState, problems: list[Problem]) -> tuple[list[Problem], Path]:
    """The file to write, and why its name cannot be had; other problems are added."""
    stem = name.strip().removesuffix(ENDING)
    if not NAME.fullmatch(stem) or TOKENS in stem:
        fix = "Use letters, digits, spaces and . , ( ) + = - _, beginning with a letter or digit, 120 at most."
        problems.append(Problem("name_invalid", f"{name[:100]!r} is not a name for a file.", fix))
        return [], state.loras.library / "none"
    target = state.loras.library / f"{stem}{ENDING}"
    folder = target.parent
    if folder.is_symlink() or (folder / RECORD).exists() or (folder.exists() and not folder.is_dir()):
        message = f"{folder} is not a folder of LoRA files, but a run, a link or a file."
        problems.append(Problem("folder_unusable", message, f"Rename it: what the tools write goes to {LIBRARY}."))
    running = [row for row in state.tasks.rows() if row["status"] == "running" and row["kind"] == KIND]
    if os.path.lexists(target) or any(row["about"].get("output") == target.name for row in running):
        return [
            Problem("name_taken", f"There is a LoRA {target.name} in the library already.", "Choose another name.")
        ], target
    return [], target


def option_problems(asked: AskedTool) -> list[Problem]:
    """What is wrong with the options by themselves."""
    sent = asked.model_fields_set - {"tool", "name", "loras"}
    options = [each for each in sorted(sent) if getattr(asked, each) is not None]
    found = [
        Problem("flag_not_for_command", f"{each} is not for {asked.tool}.", "Leave it out.")
        for each in options
        if each not in OPTIONS[asked.tool]
    ]
    least, most = COUNTS[asked.tool]
    if asked.run is not None:
        least = most = 0
    if not least <= len(asked.loras) <= most:
        needed = f"{least}" if least == most else f"{least} to {most}"
        found.append(
            Problem(
                "wrong_number_of_files",
                f"{asked.tool} takes {needed} files, not {len(asked.loras)}.",
                "Choose as many.",
            )
        )
    if asked.rank is not None and not 1 <= asked.rank <= MOST_RANK:
        found.append(Problem("rank_out_of_range", f"rank is {asked.rank}.", f"Use 1 to {MOST_RANK}."))
    for name in ("energy", "frobenius", "decay"):
        value = getattr(asked, name)
        if value is not None and not 0.0 < value <= 1.0:
            found.append(Problem("value_out_of_range", f"{name} is {value:g}.", "Use a number over 0 and at most 1."))
    if asked.ratio is not None and not 1.0 <= asked.ratio < math.inf:
        found.append(Problem("value_out_of_range", f"ratio is {asked.ratio:g}.", "Use a number of at least 1."))
    if asked.family is not None and asked.family not in FAMILIES:
        found.append(Problem("family_unknown", f"{asked.family} is no family.", f"One of: {', '.join(FAMILIES)}."))
    return [*found, *weight_problems(asked), *needed_problems(asked)]


def weight_problems(asked: AskedTool) -> list[Problem]:
    """What is wrong with the weights of the files."""
    if asked.weights is None:
        return []
    if asked.decay is not None:
        return [Problem("flags_exclude_each_other", "weights and decay exclude each other.", "Leave one out.")]
    if len(asked.weights) != len(asked.loras):
        message = f"There are {counted(len(asked.weights), 'weight')} for {counted(len(asked.loras), 'file')}."
        return [Problem("weights_do_not_match", message, "Give one for each file.")]
    if not all(map(math.isfinite, asked.weights)) or max(map(abs, asked.weights), default=0.0) < 1e-6:
        return [Problem("weights_are_zero", "The weights are all 0.", "Give at least one file a weight.")]
    if max(map(abs, asked.weights)) > 100.0:
        return [Problem("value_out_of_range", "A weight is over 100.", "Use weights of about 1.")]
    if asked.tool == "average" and sum(asked.weights) <= 0:
        return [
            Problem(
                "weights_sum_to_zero", f"The weights sum to {sum(asked.weights):g}.", "Give weights with a sum above 0."
            )
        ]
    return []


def needed_problems(asked: AskedTool) -> list[Problem]:
    """Options that a tool lacks, or has beside others that exclude them."""
    tool, to, has_rank = asked.tool, asked.to, asked.rank is not None
    lacking = [each for each in ("base", "tuned", "rank") if getattr(asked, each) is None] if tool == "extract" else []
    of_parameters = asked.run is not None or asked.of == "parameters"
    rules = {  # message and fix, and whether it is so
        ("resize needs a limit.", "Give a rank."): tool == "resize"
        and all(getattr(asked, each) is None for each in LIMITS),
        (f"extract needs {', '.join(lacking)}.", "Give each of them."): bool(lacking),
        ("convert needs a format.", f"One of: {', '.join((*FORMATS, LOWERED, COMFYUI))}."): tool == "convert"
        and to is None,
        ("A plain LoRA of another kind needs a rank.", "For example 32."): tool == "convert"
        and to == LOWERED
        and not has_rank,
        ("For ComfyUI the base model is needed.", "Name the one that the file was trained on."): tool == "convert"
        and to == COMFYUI
        and asked.model is None,
        (f"{to} is exact and takes neither rank nor base model.", "Leave them out."): tool == "convert"
        and to in FORMATS
        and (has_rank or asked.model is not None),
        ("For ComfyUI only magnitudes change.", "Leave rank and dtype out."): to == COMFYUI
        and (has_rank or asked.dtype is not None),
        (f"{tool} does not write {to}.", f"One of: {', '.join(FORMATS)}."): tool != "convert"
        and to in (LOWERED, COMFYUI),
        ("An average of parameters keeps the rank.", "Leave rank out."): tool == "average"
        and of_parameters
        and has_rank,
        ("A run's checkpoints are averaged by their parameters.", "Leave weights and of out."): asked.run is not None
        and (asked.weights is not None or asked.of == "updates"),
    }
    return [Problem("tool_refused", *words) for words, is_so in rules.items() if is_so]


def file_problems(asked: AskedTool, rows: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Files that are damaged, of a kind that the tool does not take, or for different families."""
    found = [
        Problem("lora_unusable", f"{row['name']}: {row['problem']}", "Choose another.")
        for row in rows
        if row["is_damaged"]
    ]
    whole = [row for row in rows if row["kind"] is not None]
    is_any = (asked.tool == "convert" and asked.to in (LOWERED, None)) or asked.of == "parameters"
    for row in whole:
        if asked.tool == "convert" and asked.to == COMFYUI and row["kind"] not in REWRITTEN_KINDS:
            found.append(
                Problem("lora_unusable", f"{row['name']} is a {row['kind']}.", "ComfyUI computes it exactly as it is.")
            )
        elif asked.to != COMFYUI and not is_any and row["kind"] != PLAIN:
            message = f"{row['name']} is a {row['kind']}: {asked.tool} takes LoRA files."
            found.append(Problem("lora_unusable", message, "Convert it to a plain LoRA first."))
        elif asked.to == LOWERED and row["kind"] in OVER_BASE and asked.model is None:
            message = f"{row['name']} is a {row['kind']}, which changes a weight that it does not hold."
            found.append(Problem("lora_unusable", message, "Name its base model."))
    families = {row["family"]: row["name"] for row in rows if row["family"] is not None}
    if len(families) > 1:
        words = ", ".join(f"{name} is for {family}" for family, name in families.items())
        found.append(
            Problem(
                "loras_of_several_families",
                f"These are LoRAs for different models: {words}.",
                "Choose files for one family.",
            )
        )
    return found


def read_places(asked: AskedTool, state: ServerState, problems: list[Problem]) -> dict[str, str]:
    """The real paths of models and of a run, by option; what may not be read or is not there is added to the problems."""
    found = {}
    for option in MODELS:
        if (named := getattr(asked, option)) is not None:
            try:
                path = allowed(named, state.roots)
            except Refusal as error:
                problems += error.problems
                continue
            found[option] = str(path)
            if not path.exists():
                problems.append(Problem("file_missing", f"{path} is not there.", "Choose a model's folder or file."))
    if asked.run is not None:
        try:
            found["run"] = str(folder_of(asked.run, state.output))
        except Refusal as error:
            problems += error.problems
    return found


def named_model(named: str, state: ServerState) -> str:
    """A base model that images are generated with: a real path, or the id of a hub. Raises Refusal outside of the roots."""
    if "\0" not in named and not os.path.exists(named) and as_hub_part(named) is not None:
        return named
    path = allowed(named, state.roots)
    if not path.exists():
        raise Refusal(422, Problem("file_missing", f"{path} is not there.", "Choose a model's folder or file."))
    return str(path)


def name_of_model(named: str) -> str:
    """What people call a model: the last part of its path."""
    return "built-in miniature model" if named == str(BASE_FOLDER) else Path(named).name or named
