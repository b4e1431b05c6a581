"""The docs name existing commands, the constants of the code, and valid links."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import astuple
from difflib import get_close_matches
from pathlib import Path

import pytest
import yaml

import write_docs
from lora_trainer.cli.arguments import Parser, add_debug_argument, unknown_arguments
from lora_trainer.cli.main import COMMANDS
from lora_trainer.config.presets import preset_layers, presets
from lora_trainer.config.schema import SourceSection
from lora_trainer.config.toml import parse_assignment, section_types, setting_names
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.evaluation.lora_check import LORA_CHECKS
from lora_trainer.evaluation.verdict import SCALES
from lora_trainer.importers import kohya_dataset, kohya_gui, musubi
from lora_trainer.importers.other_names import rules

CHECKOUT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")])
NAMES = [path.relative_to(CHECKOUT).as_posix() for path in DOCUMENTS]

PROGRAM = re.compile(r"(?:\S*/)?(?:lora-trainer|python -m lora_trainer)(?= )")
LAUNCH = "accelerate launch"
SITES = (
    *("arxiv.org", "keepachangelog.com", "pre-commit.com", "semver.org"),
    *("download.pytorch.org", "huggingface.co", "pytorch.org"),  # in lines of `doctor`
    *("ui.perfetto.dev", "speedscope.app"),  # which show a profile
    "host",  # a name to replace
)
# Traces of the author's machine: absolute paths, but for Linux's own devices, and addresses.
MACHINE = re.compile(r"(?<![\w.~<>/:])/(?!dev/)\w+/\w+|\b[A-Z]:\\\w+|localhost|\b\d{1,3}(?:\.\d{1,3}){3}\b")


def code_of(text: str) -> Iterator[str]:
    """Each line of fenced blocks and each inline code span."""
    for index, part in enumerate(re.split(r"^```.*$", text, flags=re.MULTILINE)):
        if index % 2:
            yield from part.replace("\\\n", " ").splitlines()
        else:
            yield from re.findall(r"`([^`\n]+)`", part)


def documented(start: str) -> list[str]:
    found = [line.strip() for path in DOCUMENTS for line in code_of(path.read_text("utf-8"))]
    return sorted({line for line in found if line.startswith(start)})


def commands() -> list[str]:
    """Arguments of every `lora-trainer …` in the documents."""
    found = {line[match.end() :].strip() for line in documented("") if (match := PROGRAM.match(line))}
    return sorted(found)


def launches() -> list[str]:
    return [line.removeprefix(LAUNCH).strip() for line in documented(LAUNCH + " ")]


def check_command_line(words: list[str]) -> None:
    """The command exists, its arguments parse, its presets and settings exist. What a shell redirects is not read."""
    words = words[: words.index(">")] if ">" in words else words
    if words == ["--help"]:
        return
    assert words[0] in COMMANDS, f"no command {words[0]}"
    if len(words) == 1 or words[1:] == ["--help"]:  # a mention of a command, or its help
        return
    parser = Parser(prog=words[0], allow_abbrev=False)
    COMMANDS[words[0]].add_arguments(parser)
    add_debug_argument(parser)
    parsed, unknown = parser.parse_known_args(words[1:])
    assert unknown_arguments(parser, unknown) == []
    assert preset_layers(getattr(parsed, "preset", [])).problems == ()
    for text in getattr(parsed, "set", []):
        assignment = parse_assignment(text)
        assert not isinstance(assignment, Problem), assignment
        assert f"{assignment[0]}.{assignment[1]}" in setting_names()


SECTIONS = "|".join(section_types())
DOTTED = re.compile(rf"(?<![\w./-])(?:{SECTIONS})\.[a-z_0-9]+(?:\.[a-z_0-9]+)*(?![\w(/\-])")
# What a message tells a user to set; in code no name stands behind such a word.
ADVISED = re.compile(
    rf"(?:[Ss]et|--set|[Rr]emove|[Rr]aise|[Ll]ower|[Cc]heck|with) ((?:{SECTIONS})\.[a-z_0-9]+)(?![\w(/\-.])"
)
FILE_ENDINGS = (".json", ".jsonl", ".onnx", ".toml", ".py", ".safetensors")
# Fields of run.json, and keys of files.
NO_SETTINGS = (
    "diff_output_preservation_class",  # of ai-toolkit's datasets
    "lora.images",
    "lora.numbers.learning.by_noise",
    "lora.choice",
    "text_encoder.text_model",
    "model.diffusion_model",
    "in_steps",  # of system.jsonl
)
# In code that is no text: `with run.writer`.
NO_ADVICE = ("run.writer",)
# `ss_…` are of a LoRA's header, the others folders of a model and a key of a LoRA.
NO_KEYS = re.compile(r"ss_\w+|text_encoder_[23]|network_weight")


def wrong_settings(text: str, keys: frozenset[str], foreign: frozenset[str]) -> set[str]:
    """Names in backticks, and in advice, that are nearly those of settings, or begin with a section, and are none."""
    known = foreign.union(setting_names(), NO_SETTINGS)
    found = set[str]()
    for span in re.findall(r"`([^`\n]+)`", text):
        found |= {name for name in DOTTED.findall(span) if not name.endswith(FILE_ENDINGS)}
        bare = re.fullmatch(r"([a-z0-9]+(?:_[a-z0-9]+)+)(?: ?= ?.*)?", span)
        if bare and bare[1] not in keys | foreign and not NO_KEYS.fullmatch(bare[1]):
            found |= {bare[1]} if get_close_matches(bare[1], keys, 1, cutoff=0.9) else set()
    found |= {name for name in ADVISED.findall(text) if name not in NO_ADVICE}
    return found - known


def test_every_setting_that_is_named_exists() -> None:
    """In the docs, in comments and in messages; names of other trainers are those that an importer reads."""
    tables = (*rules(), musubi.RULES, kohya_dataset.RULES, kohya_gui.MORE_RULES)
    foreign = frozenset(key for table in tables for key in table) | {"train.timestep_type"}
    keys = frozenset(name.partition(".")[2] for name in setting_names()) | SourceSection.model_fields.keys()
    code = [path for folder in ("lora_trainer", "scripts") for path in (CHECKOUT / folder).rglob("*.py")]
    wrong = {}
    for path in [*DOCUMENTS, *code, *(CHECKOUT / "presets").rglob("*.toml")]:
        of_docs = keys if path.suffix == ".md" else frozenset[str]()  # names of variables are near those of settings
        if path.name != "CHANGELOG.md" and (names := wrong_settings(path.read_text("utf-8"), of_docs, foreign)):
            wrong[path.relative_to(CHECKOUT).as_posix()] = names
    assert wrong == {}


@pytest.mark.parametrize("text", ["`dropout_every_epochs = 3`", "`lora.rang`", "Set train.max_step lower."])
def test_the_check_of_settings_can_fail(text: str) -> None:
    keys = frozenset(name.partition(".")[2] for name in setting_names())
    assert wrong_settings(text, keys, frozenset())
    assert not wrong_settings("`lora.rank` `run.json` `loss` Set train.max_steps lower.", keys, frozenset())


def test_there_are_documents_with_commands() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/scores.md"} <= set(NAMES)
    assert len(commands()) >= 8
    assert len(launches()) >= 2
    assert len(documented("make ")) >= 5


@pytest.mark.parametrize("line", commands())
def test_a_documented_command_parses(line: str) -> None:
    check_command_line(shlex.split(line))


@pytest.mark.parametrize("line", launches())
def test_a_documented_launch_parses(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "--config_file":
        assert (CHECKOUT / words[1]).is_file()
        words = words[2:]
    assert words[0] == "scripts/train_lora.py"
    assert (CHECKOUT / words[0]).is_file()
    check_command_line(["train", *words[1:]])


@pytest.mark.parametrize("line", ["trian", "train --presets 12gb", "train --preset 13gb", "train --set lora.rang=1"])
def test_the_check_of_a_command_line_can_fail(line: str) -> None:
    with pytest.raises((AssertionError, UsageError)):
        check_command_line(shlex.split(line))


@pytest.mark.parametrize("line", documented("make "))
def test_a_documented_make_target_exists(line: str) -> None:
    targets = re.findall(r"^([a-z-]+):", (CHECKOUT / "Makefile").read_text("utf-8"), flags=re.MULTILINE)
    assert set(line.split()[1:]) <= set(targets)


def test_the_readme_lists_every_command() -> None:
    readme = (CHECKOUT / "README.md").read_text("utf-8")
    assert [name for name in COMMANDS if f"| `lora-trainer {name}" not in readme] == []


def test_the_readme_is_short() -> None:
    assert len((CHECKOUT / "README.md").read_text("utf-8").splitlines()) <= 150


def pages_in(navigation: object) -> list[str]:
    """The paths in a part of mkdocs.yml's `nav`: lists of titles with a path, or with more of the same."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [path for part in parts for path in pages_in(part)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_once() -> None:
    site = yaml.safe_load((CHECKOUT / "mkdocs.yml").read_text("utf-8"))
    folder = CHECKOUT / site["docs_dir"]
    pages = [path.relative_to(folder).as_posix() for path in folder.rglob("*.md")]
    assert sorted(pages_in(site["nav"])) == sorted(pages)
    assert [title for part in site["nav"] for title in part] == [
        "Home",
        "Tutorials",
        "How-to",
        "Reference",
        "Explanation",
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("docs/")])
def test_a_page_opens_with_its_purpose(name: str) -> None:
    title, purpose, *_ = (CHECKOUT / name).read_text("utf-8").split("\n\n")
    assert re.fullmatch(r"# \S.*", title)
    assert re.match(r"[A-Z`-].*\.", purpose, flags=re.DOTALL), purpose


def test_the_site_loads_nothing_from_the_network() -> None:
    site = yaml.safe_load((CHECKOUT / "mkdocs.yml").read_text("utf-8"))
    assert site["theme"]["font"] is False
    assert {"extra_css", "extra_javascript"} & set(site) == set()


def test_the_preset_tables_equal_the_presets() -> None:
    page = (CHECKOUT / "docs" / "presets.md").read_text("utf-8")
    constants = dict[str, str]()
    for names, rest in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", page, flags=re.MULTILINE):
        constants |= dict.fromkeys(re.findall(r"\w+", names), rest)
    for name, preset in presets().items():
        values = preset.values
        if preset.kind == "tiers":
            samples, rank, attention = constants[name].split(" | ")
            assert (int(samples), int(rank)) == (values["train"]["effective_batch_size"], values["lora"]["rank"])
            assert attention.startswith("xformers") == (values["hardware"]["attention_backend"] == "xformers")
        elif preset.kind == "goals":
            optimizer, rate, schedule, extras, exposures = constants[name].split(" | ")
            assert ("8-bit" in optimizer) == (values["optimizer"]["name"] == "adamw8bit")
            assert float(rate) == values["optimizer"]["learning_rate"]
            assert schedule == values["lr_scheduler"]["name"]
            assert ("min-SNR 5" in extras) == (values["loss"]["min_snr_gamma"] == 5.0)
            assert ("multi-resolution" in extras) == (values["noise"]["multires_iterations"] > 0)
            assert int(exposures) == values["train"]["total_repeats"]


CONSTANTS = re.findall(
    r"^\| `([A-Z_]+)(?:\.(\w+))?` \| `([\w/]+)\.py` \| ([\d.e-]+) \|$",
    (CHECKOUT / "docs" / "scores.md").read_text("utf-8"),
    flags=re.MULTILINE,
)


@pytest.mark.parametrize(("name", "key", "module", "documented"), CONSTANTS)
def test_a_documented_constant_equals_the_code(name: str, key: str, module: str, documented: str) -> None:
    value = getattr(importlib.import_module(f"lora_trainer.{module.replace('/', '.')}"), name)
    assert float(documented) == (value[key] if key else value)


def test_every_constant_of_the_scores_has_a_row() -> None:
    text = (CHECKOUT / "docs" / "scores.md").read_text("utf-8")
    blocks = " ".join(re.findall(r"^```\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    named = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", blocks)) | set(re.findall(r"`([A-Z_]{4,})`", text))
    assert len(CONSTANTS) > 15
    assert named - {name for name, *_ in CONSTANTS} - {"SEED"} == set()


def test_the_gates_of_the_verdict_equal_the_code() -> None:
    text = (CHECKOUT / "docs" / "scores.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (-?[\d.]+) \| ([\d.]+) \| ([\d.]+) \| [^|]+ \|$", text, flags=re.MULTILINE)
    assert {name: tuple(map(float, numbers)) for name, *numbers in rows} == {
        name: astuple(scale) for name, scale in SCALES.items()
    }
    efforts = re.findall(r"^\| `(full|lite)`" + 5 * r" \| (\d+)" + r" \|", text, flags=re.MULTILINE)
    assert {name: tuple(map(int, numbers)) for name, *numbers in efforts} == {
        name: astuple(effort) for name, effort in LORA_CHECKS.items()
    }


def test_the_diagram_of_the_house_equals_the_contract() -> None:
    contracts = tomllib.loads((CHECKOUT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [set(re.findall(r"(?<![(\w])\w+", layer)) for layer in contracts[0]["layers"]]
    text = (CHECKOUT / "CONTRIBUTING.md").read_text("utf-8")
    (diagram,) = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    drawn = [re.match(r"│ ([a-z_ ]+?)  ", line) for line in diagram.splitlines()]
    assert [set(each[1].split()) for each in drawn if each] == layers


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    path = CHECKOUT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if not target.startswith("https://"):
            assert (path.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_files_named_in_the_docs_exist(name: str) -> None:
    text = (CHECKOUT / name).read_text("utf-8")
    roots = (CHECKOUT, CHECKOUT / "lora_trainer")
    for target, symbol in re.findall(r"`((?:\w+/)+\w+\.(?:py|toml|md|yaml|sh))(?::(\w+))?`", text):
        found = [root / target for root in roots if (root / target).is_file()]
        if re.search(r"[A-Z]{3}", target):  # a name for the reader to choose
            continue
        assert found, target
        assert symbol in found[0].read_text("utf-8"), f"{target}:{symbol}"


@pytest.mark.parametrize("name", NAMES)
def test_no_trace_of_a_machine(name: str) -> None:
    text = (CHECKOUT / name).read_text("utf-8")
    assert MACHINE.findall(text) == []
    assert MACHINE.findall(text + " see /srv/models/sd15") == ["/srv/models"]
    hosts = {host.removeprefix("www.") for host in re.findall(r"https?://([^/\s)]+)", text)}
    assert hosts <= set(SITES)


def test_a_page_that_differs_from_the_code_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.md").write_text("old", encoding="utf-8")
    monkeypatch.setattr(write_docs, "DOCS", tmp_path)
    monkeypatch.setattr(write_docs, "PAGES", {"one.md": lambda page: "new"})
    monkeypatch.setattr("sys.argv", ["write_docs.py", "--check"])
    assert write_docs.main() == 1
    assert (tmp_path / "one.md").read_text("utf-8") == "old"
    monkeypatch.setattr("sys.argv", ["write_docs.py"])
    assert write_docs.main() == 0
    assert (tmp_path / "one.md").read_text("utf-8") == "new"
