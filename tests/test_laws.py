"""The laws of the code (docs/architecture.md): sizes, names, words. A number that may only fall is lowered when it can be."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import grimp
import pytest

from lora_trainer.adapters.adapter_kinds import ADAPTERS
from lora_trainer.lora_format.kinds import KINDS, LORA
from lora_trainer.training import fallbacks
from tests.recipes.recipe import Bench, draw_images, save_tiny_model

MOST_FILE_LINES = 800
MOST_FUNCTION_LINES = 80
LEAST_MEDIAN_LINES = 80
MOST_FRAMES = 8
# A function used once with a body under 6 lines earns its place by a formula, a name that the field knows, or a test.
SMALL_BODY = 6
MOST_IMPORTED_BY_STEP = 25
MOST_SMALL_USED_ONCE = 415  # may only fall; the aim is 150
MOST_ARGUMENTS = 6
# Functions that still have more: may only become fewer.
WITH_MORE_ARGUMENTS = frozenset(
    (
        "memory_plan/estimate.py:_plan",
        "memory_plan/memory_model.py:_subject",
        "memory_plan/memory_model.py:traced_memory_model",
        "memory_plan/trace.py:flash",  # the operator's own
        "memory_plan/trace.py:make_subject",
        "memory_plan/trace.py:trace",
        "models/memory/phases.py:place_drawing",
        "models/quantization/eight_bits.py:forward",  # of an autograd function
        "models/transformer.py:transformer_facts",
        "report/chart.py:make_chart",
        "run/trainer.py:__init__",  # of ProductionTrainer: the public interface
    )
)
# Module names that mean several things: may only become fewer.
SHARED_MODULE_NAMES = frozenset(
    "batch cache convert errors folder imports inputs kohya layers measures metrics plan presets reading sample store "
    "texts unet worker".split()
)
BANNED = re.compile(
    r"\b(told|hangs? on|hung on|stands? in|stood in|go(?:es|ing)? on|went on|as ever|mend(?:s|ed|ing)?|pictures?|data sets?"
    r"|rungs?|ledgers?|processors?)\b",
    re.IGNORECASE,
)
# What libraries and other programs' files call so, captions, and what is written for this test.
ALLOWED = re.compile(
    r"AutoImageProcessor|image_processor|video_processor|get_processor_dict|PROCESSOR_MAPPING_NAMES|preprocessor|processor_config|attention processors?|\w*Processor\b|PROCESSORS|\.processors?\b"
    r"|set_processor|processor(?==|\.__call__|\(|:| = )|image processor|a processor's signature|data_sets|a picture of a|picture \{index\}"
    r"|background picture|\"pictures\"|\"processor[\"/]|\|processor\||Picture (?:1|\{number\}): "
)
WITHOUT_WORDS = ("CHANGELOG.md", "tests/test_laws.py", "docs/tried.md")  # history, and this list
OF_CAPTIONS = ("scripts/builtin_base/", "tests/builtin/", "tests/importers/files/", "lora_trainer/builtin/")


@dataclass(frozen=True)
class SourceFunction:
    """`body` is its number of lines without the docstring."""

    name: str
    lines: int
    body: int
    arguments: int
    decorated: bool


@dataclass(frozen=True)
class SourceFile:
    name: str
    lines: int
    functions: tuple[SourceFunction, ...]
    classes: tuple[str, ...]
    used: Counter[str]
    codes: tuple[str, ...]  # the first arguments of problems and findings that are texts


@cache
def source_files(checkout: Path) -> tuple[SourceFile, ...]:
    """All laws read them: each is parsed once."""
    paths = [
        path for folder in ("lora_trainer", "scripts", "tests") for path in sorted((checkout / folder).rglob("*.py"))
    ]
    return tuple(read_source(path.relative_to(checkout).as_posix(), path.read_text("utf-8")) for path in paths)


def read_source(name: str, text: str) -> SourceFile:
    functions, classes, codes, used = [], [], [], Counter[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Problem", "Finding"):
            codes += [str(each.value) for each in node.args[:1] if isinstance(each, ast.Constant)]
        if isinstance(node, ast.Name):
            used[node.id] += 1
        elif isinstance(node, ast.Attribute):
            used[node.attr] += 1
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(read_function(node))
    return SourceFile(name, len(text.splitlines()), tuple(functions), tuple(classes), used, tuple(codes))


def read_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> SourceFunction:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return SourceFunction(
        node.name,
        (node.end_lineno or node.lineno) - node.lineno + 1,
        (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0,
        len([each for each in arguments if each.arg not in ("self", "cls")]),
        bool(node.decorator_list),
    )


def of_package(checkout: Path) -> list[SourceFile]:
    return [file for file in source_files(checkout) if file.name.startswith("lora_trainer/")]


def test_files_and_functions_are_short_enough_to_read(checkout: Path) -> None:
    files = source_files(checkout)
    assert len(files) > 300
    assert {file.name: file.lines for file in files if file.lines > MOST_FILE_LINES} == {}
    functions = [(file.name, function) for file in files for function in file.functions]
    assert [f"{name}:{each.name} {each.lines}" for name, each in functions if each.lines > MOST_FUNCTION_LINES] == []
    modules = [file.lines for file in of_package(checkout) if "__init__" not in file.name]
    assert statistics.median(modules) >= LEAST_MEDIAN_LINES


def test_small_functions_that_are_used_once_become_fewer(checkout: Path) -> None:
    files = of_package(checkout)
    uses = Counter[str]()
    for file in files:
        uses.update(file.used)
    small = [
        (file.name, function.name)
        for file in files
        for function in file.functions
        if not function.decorated and 0 < function.body < SMALL_BODY
    ]
    once = [f"{name}:{function}" for name, function in small if uses[function] == 1]
    assert once
    assert len(once) <= MOST_SMALL_USED_ONCE, once


def test_functions_have_few_arguments(checkout: Path) -> None:
    many = {
        f"{file.name.removeprefix('lora_trainer/')}:{function.name}"
        for file in of_package(checkout)
        for function in file.functions
        if function.arguments > MOST_ARGUMENTS
    }
    assert many <= WITH_MORE_ARGUMENTS, sorted(many - WITH_MORE_ARGUMENTS)


def test_a_name_means_one_thing(checkout: Path) -> None:
    classes, modules = defaultdict(set), defaultdict(set)
    for file in of_package(checkout):
        path = Path(file.name)
        if path.stem != "__init__" and not {"families", "kinds", "sources", "hooks"} & set(path.parts):
            modules[path.stem].add(file.name)
        for name in file.classes:
            classes[name].add(file.name)
    assert {each: places for each, places in classes.items() if len(places) > 1} == {}
    assert {each for each, places in modules.items() if len(places) > 1} <= SHARED_MODULE_NAMES


def names_in_code(text: str) -> set[str]:
    """The texts and imported modules of a file: not its comments, and its sentences only as a whole."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").rpartition(".")[2])
    return found


@pytest.mark.parametrize("name", sorted(set(ADAPTERS) - {LORA}))
def test_an_adapter_kind_is_two_files(name: str, checkout: Path) -> None:
    """Its name, its title, and the names of its tensors; but for the values of settings and what other programs call it."""
    kind = KINDS[name]
    own = {f"lora_trainer/adapters/{name}.py", f"lora_trainer/lora_format/kinds/{name}.py"}
    marks = re.compile(rf"\.?(?:{name}|{kind.title}|{kind.algorithm}|(?:{'|'.join(kind.parts)})(?!factor).*)")
    found = {
        file.name
        for file in of_package(checkout)
        if not file.name.startswith(("lora_trainer/importers/", "lora_trainer/config/schema/"))
        and any(map(marks.fullmatch, names_in_code((checkout / file.name).read_text("utf-8"))))
    }
    assert found == own


def test_problems_and_findings_have_codes(checkout: Path) -> None:
    """Words of lower case, never a sentence in the place of the code."""
    codes = [(file.name, code) for file in of_package(checkout) for code in file.codes]
    assert len(codes) > 500
    assert [each for each in codes if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", each[1])] == []


def test_words_are_those_of_the_field(checkout: Path) -> None:
    """In names, messages, comments and documents (language of diffusers and kohya's scripts)."""
    tracked = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    found, read = [], 0
    for name in tracked.splitlines():
        path = checkout / name
        if path.suffix not in (".py", ".md", ".toml", ".sh", ".yaml", ".html") or not path.is_file():
            continue
        if name in WITHOUT_WORDS or name.startswith(OF_CAPTIONS):
            continue
        read += 1
        text = path.read_text("utf-8")
        if not BANNED.search(re.sub(r"[_-]", " ", text)):
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := BANNED.search(re.sub(r"[_-]", " ", ALLOWED.sub("", line))):
                found.append(f"{name}:{number}: {match[0]!r} in {line.strip()[:100]}")
    assert read > 300
    assert found == [], "\n".join(found)


def test_the_step_imports_few_modules() -> None:
    """With all that its imports load at run time, deferred imports too."""
    graph = grimp.build_graph("lora_trainer", exclude_type_checking_imports=True, cache_dir=None)
    assert graph.find_upstream_modules("lora_trainer.run.run"), "the graph has imports"
    loaded = graph.find_upstream_modules("lora_trainer.training.step")
    assert "lora_trainer.core.errors" in loaded
    assert len(loaded) <= MOST_IMPORTED_BY_STEP, sorted(loaded)


def test_the_step_is_few_frames_below_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of the package between `main(["train", …])` and `train_step`."""
    seen: list[list[str]] = []

    def train_step(*arguments: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        names = []
        while frame is not None and frame.f_code.co_name != "main":
            if "lora_trainer" in frame.f_code.co_filename and "contextlib" not in frame.f_code.co_filename:
                names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
            frame = frame.f_back
        seen.append(names)
        raise KeyboardInterrupt

    monkeypatch.setattr(fallbacks, "train_step", train_step)
    bench = Bench(save_tiny_model(tmp_path), draw_images(tmp_path / "data"), tmp_path / "runs", tmp_path / "cache")
    bench.run("frames", steps=1, validation__split=0)
    assert 1 <= len(seen[0]) <= MOST_FRAMES, seen[0]
