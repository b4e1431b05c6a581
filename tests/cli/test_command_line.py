"""The command line from outside: output, exit codes, and imports."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from PIL import Image

from lora_trainer.cli import main as cli
from lora_trainer.cli.arguments import SAMPLE_FLAGS
from lora_trainer.cli.errors import report_error
from lora_trainer.cli.main import COMMANDS, Command, main
from lora_trainer.cli.sample_arguments import add_sample_arguments
from lora_trainer.config.common_names import COMMON_NAMES
from lora_trainer.config.toml import setting_names
from lora_trainer.core.errors import DatasetRefused, Problem
from lora_trainer.core.findings import folded
from lora_trainer.run.order import Order
from tests.recipes.recipe import draw_images


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def row(output: str, setting: str) -> list[str]:
    """A row of --explain's table without its mark: setting, value, origin and, of a preset, evidence."""
    (line,) = [line for line in output.splitlines() if f" {setting} " in line]
    return re.split(r" {2,}", line.lstrip("* "))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, name, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80, "a usual terminal wraps no line"
    assert COMMANDS[name].summary in out
    assert "lora-trainer" in out.split("example")[-1]


@pytest.mark.parametrize(
    "flags",
    [
        "--train_batch_size 4 --gradient_accumulation_steps 8",
        "--gradient-accumulation-steps=8 --network_dim 16 --per_device_train_batch_size=4",
    ],
)
def test_batch_and_accumulation_of_other_trainers_are_one_number(
    capsys: pytest.CaptureFixture[str], flags: str
) -> None:
    code, _, err = run(capsys, "train", *shlex.split(flags))
    assert code == 2
    assert err.count("train.effective_batch_size=32") == 2


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--network_dim 4", "Use --set lora.rank=4."),
        ("--rank=4", "Use --set lora.rank=4."),
        ("--lora_rank 4", "Use --set lora.rank=4."),
        ("--lr 1e-4", "Use --set optimizer.learning_rate=1e-4."),
        ("--learning_rate 1e-4", "Use --set optimizer.learning_rate=1e-4."),
        ("--steps 4", "Use --max-steps 4."),
        ("--max_train_steps 4", "Use --max-steps 4."),
        ("--epochs 4", "Use --set train.max_epochs=4."),
        ("--batch_size 4", "Use --set train.effective_batch_size=4."),
        ("--train-batch-size 4", "Use --set train.effective_batch_size=4."),
        ("--resolution 512", "Use --set data.resolution=512."),
        ("--output_dir 'my runs'", "Use --output 'my runs'."),
        ("--output_name cat", "Use --name cat."),
        ("--pretrained_model_name_or_path a/b", "Use --model a/b."),
        ("--train_data_dir images", "Use --data images."),
        ("--optimizer_type AdamW", "Use --set optimizer.name=VALUE."),
        ("--resume_from_checkpoint latest", "Use --resume."),
        ("--xformers", "It has no use here ("),
        ("--lora_alpha 4", "Use --set lora.alpha=4."),
        ("--dataset images", "Use --data images."),
        ("--base_model_precision int8-quanto", "Use --set memory.weight_dtype=VALUE."),
    ],
)
def test_flags_of_other_trainers_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str], flag: str, ours: str
) -> None:
    code, _, err = run(capsys, "train", *shlex.split(flag))
    assert code == 2
    assert ours in err
    assert "Unexpected argument" not in err


@pytest.mark.parametrize(
    ("setting", "answer"),
    [
        ("network_dim=16", "Use --set lora.rank=16."),
        ("lora.dim=16", "Use --set lora.rank=16."),
        ("network.linear=16", "Use --set lora.rank=16."),
        ("optimizer.type=AdamW", "Use --set optimizer.name=VALUE."),
        ("optimizer.lr=1e-4", "Use --set optimizer.learning_rate=1e-4."),
        ("train.lr=1e-4", "Use --set optimizer.learning_rate=1e-4."),
        ("optimizer.optimizer=ADAMW", "Use --set optimizer.name=VALUE."),
        ("sample.steps=20", "Use --set sample.num_inference_steps=20."),
        ("xformers=true", "It has no use here ("),
        ("batch_size=4", "Use --set train.effective_batch_size=4."),
        ("lora_rank=4", "Use --set lora.rank=4."),
        ("lora_alpha=4", "Use --set lora.alpha=4."),
        ("dataset=images", "Use --set data.sources=VALUE."),
        ("text_encoder.lora_rank=4", "text_encoder.lora_rank"),  # ours
        ("loss=huber", "loss is a section; its settings are type,"),
        ("lora.type=LoKR", "Did you mean lokr?"),
        ("lora.type=locon", "Use --set lora.type=lora, and --set 'lora.target_modules=["),
        ("lora.type=diag-oft", "Use --set lora.type=oft."),
        ("lora.rnak=4", "Did you mean lora.rank"),
    ],
)
def test_settings_of_other_trainers_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str], setting: str, answer: str
) -> None:
    code, _, err = run(capsys, "train", "--set", setting, "--explain")
    assert code == 2
    assert err.startswith("error: ")
    assert answer in " ".join(err.split())


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("network_dim = 4", "Use lora.rank."),
        ("batch_size = 4", "Use train.effective_batch_size."),
        ("xformers = true", "It has no use here ("),
        ("[lora]\nnetwork_alpha = 4", "Use lora.alpha."),
        ("[train]\nbatch_size = 4", "Use train.effective_batch_size."),
        ("[sample]\nsteps = 4", "Use sample.num_inference_steps."),
        ("[lora]\nrnak = 4", "Did you mean lora.rank?"),
    ],
)
def test_settings_of_other_trainers_in_a_file_are_answered_with_ours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, written: str, answer: str
) -> None:
    (tmp_path / "mine.toml").write_text(f"{written}\n[optimizer]\nbeta1 = 0.5\n", encoding="utf-8")
    code, _, err = run(capsys, "train", "--config", str(tmp_path / "mine.toml"), "--explain")
    assert code == 2
    assert answer in " ".join(err.split())
    assert "problems" not in err


def test_a_config_of_another_trainer_is_answered_with_import(
    capsys: pytest.CaptureFixture[str], checkout: Path
) -> None:
    folder = checkout / "tests" / "importers" / "files"
    files = ("kohya_config.toml", "kohya_dataset.toml", "kohya_gui.json", "aitoolkit.yaml", "onetrainer.json")
    for path in [folder / name for name in (*files, "simpletuner.json", "diffusers.sh", "musubi.sh")]:
        code, _, err = run(capsys, "train", "--config", str(path), "--explain")
        assert code == 2
        assert f"lora-trainer import {path} --output" in " ".join(err.split())
        assert "problems" not in err


def test_sample_answers_words_of_other_programs_with_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    err = run(capsys, "sample", "cat.safetensors", "--steps", "20", "--cfg-scale=4")[2]
    assert "Use --num-inference-steps 20." in err
    assert "Use --guidance-scale 4." in err


def test_every_answer_to_another_trainers_flag_can_be_typed() -> None:
    known = {*setting_names(), "--resume", "--config"}
    assert known >= set(COMMON_NAMES.values())
    parser = argparse.ArgumentParser()
    add_sample_arguments(parser)
    assert {flag for action in parser._actions for flag in action.option_strings} >= set(SAMPLE_FLAGS.values())


def test_a_path_without_its_flag_is_answered_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my images").mkdir()
    for word, fix in (
        ("my images", "Use --data 'my images'."),
        ("sd15.safetensors", "Use --model sd15.safetensors."),
        ("cat.toml", "Use --config cat.toml"),
        ("lora.rank=4", "Use --set lora.rank=4."),
        ("cat", "Images are named with --data"),
    ):
        code, _, err = run(capsys, "train", word)
        assert code == 2
        assert f"error: Unexpected argument {word}.\n       {fix}" in err
    assert "Name the images without a flag." in run(capsys, "check", "--data", "images")[2]


def test_a_misspelt_flag_is_reported_beside_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    err = run(capsys, "extract", "--rnak", "4")[2]
    assert err.startswith("error: 2 problems\n  1. Unknown flag --rnak.\n     Did you mean --rank")
    assert "are required: TUNED." in err
    err = run(capsys, "extract", "base", "tuned", "--rnak=4", "--dtype", "fp4")[2]
    assert err.startswith("error: 4 problems\n")
    for expected in ("--rnak.", "--rank is missing.", "--output is missing.", "--dtype fp4 is not known."):
        assert expected in err


def test_the_overview_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert all(f"  {name} " in out and command.summary in out for name, command in COMMANDS.items())
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert "commands:" in err


def test_explain_shows_each_value_and_its_origin(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[lora]\nrank = 9\n[optimizer]\nbeta1 = 0.5\n", encoding="utf-8")
    model = tmp_path / "my model"
    model.mkdir()
    (model / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}', encoding="utf-8")
    (model / "unet").mkdir()
    (model / "unet" / "config.json").write_text('{"cross_attention_dim": 768}', encoding="utf-8")
    code, out, err = run(
        capsys, "train", "--preset", "12gb", "--preset=quality", "--config", str(file), "--data", "a", "--data", "b c",
        "--set", "optimizer.beta1=0.6", "--max-steps", "7", "--model", str(model), "--offline", "--explain",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert row(out, "lora.rank") == ["lora.rank", "9", f"--config {file}"]
    assert row(out, "optimizer.beta1") == ["optimizer.beta1", "0.6", "--set"]
    assert row(out, "memory.limit_gib")[2] == "preset 12gb"
    assert row(out, "train.ema_decay")[2] == "preset quality"
    assert row(out, "train.max_steps")[2] == "--max-steps"
    assert row(out, "train.seed")[2] == "default"
    assert row(out, "sample.guidance_scale")[2] == "family preset sd15"
    assert '["a", "b c"]' in out
    assert "family preset builtin" not in out  # a model is named


@pytest.mark.parametrize("command", [["produce"], ["demo"], ["plan"], ["cache"], ["bench", "step"], ["batch", "x"]])
def test_every_command_with_explain_only_explains(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = ["--set", f"run.output={tmp_path}"]  # `bench` writes no run, and has no --output
    code, out, _ = run(capsys, *command, "--set", "lora.rank=3", *output, "--explain")
    assert (code, row(out, "lora.rank")) == (0, ["lora.rank", "3", "--set"])
    assert "differs from the default" in out.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        *(["bench", "step", flag] for flag in ("--resume", "--dry-run", "--profile")),
        *(["bench", "step", flag, "1"] for flag in ("--output", "--name", "--max-steps", "--max-hours")),
        *(["cache", *rest] for rest in (["--json"], ["--verify"], ["status", "--limit-gb", "1"], ["prune", "--json"])),
        ["batch", "work", "absent", "--jobs", "2"],
        ["batch", "status", "absent", "--resume"],
        ["batch", "cancel", "absent", "ash", "--json"],
        ["batch", "absent", "--json"],
    ],
)
def test_a_command_takes_no_flag_that_it_does_not_act_on(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    flag = next(word for word in arguments if word.startswith("--"))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert flag in err
    if arguments[0] == "bench":
        assert flag not in run(capsys, "bench", "--help")[1]


def test_the_builtin_model_has_its_own_settings(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "train", "--explain")
    assert row(out, "optimizer.learning_rate")[2] == "family preset builtin"
    _, out, _ = run(capsys, "train", "--preset", "balanced", "--explain")
    assert row(out, "optimizer.learning_rate")[2] == "family preset builtin", (
        "a goal's is for models a hundred times the size"
    )
    assert row(out, "optimizer.name")[2] == "preset balanced"
    _, out, _ = run(capsys, "train", "--preset", "12gb", "--explain")
    assert row(out, "train.effective_batch_size")[1:3] == ["8", "family preset builtin"]
    _, out, _ = run(capsys, "demo", "--explain")
    assert row(out, "sample.prompts")[2] == "demo"
    _, out, _ = run(capsys, "demo", "--set", 'sample.prompts=["pomo"]', "--explain")
    assert row(out, "sample.prompts")[2] == "--set"
    _, out, _ = run(capsys, "train", "--preset", "balanced", "--set", "optimizer.learning_rate=1e-3", "--explain")
    assert row(out, "optimizer.learning_rate")[2] == "--set"


def test_a_missing_model_is_reported_with_where_it_was_set(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('[model]\npath = "gone"\n', encoding="utf-8")
    named = ("train", "--config", str(file), "--explain")
    assert "Check --model." in run(capsys, *named, "--model", "lost")[2]
    assert f"Check model.path (from --config {file})." in run(capsys, *named)[2]
    assert "Check model.path (from --set)." in run(capsys, *named, "--set", "model.path=lost")[2]
    code, out, _ = run(capsys, *named, "--set", "model.path=none")
    assert (code, row(out, "model.path")[1]) == (0, "none")


def test_all_problems_are_reported_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[lora]\nrnk = 9\n", encoding="utf-8")
    code, out, err = run(
        capsys, "train", "--reume", "--rank", "8", "--preset", "12bg", "--config", str(file), "--max-steps", "0",
        "--set", "optimizer.learning_rate=20", "--set", "nonsense", "stray", "--model", "no-such-model",
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert err.startswith("error: 9 problems\n")
    for expected in (
        "Unknown flag --reume.\n     Did you mean --resume",
        "Unknown flag --rank.\n     Use --set lora.rank=8.",
        "Unexpected argument stray.",
        "There is no preset named 12bg.\n     Did you mean 12gb",
        "There is no model at no-such-model (looked for in ",
        "mine.toml) is not a setting.\n     Did you mean lora.rank?",
        "train.max_steps = 0 (from --max-steps): must be at least 1.",
        "optimizer.learning_rate = 20 (from --set): must be at most 10.",
        "--set nonsense is not of the form section.key=value.",
    ):
        assert expected in err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["trian"], "Unknown command trian.\n       Did you mean train?"),
        (["--preset", "12gb"], "Unknown flag --preset."),
        (["train", "--preset"], "Argument --preset: expected one argument."),
        (["train", "--config", "no-such.toml"], "no-such.toml does not exist."),
        (["plan", "--set", "model.family=klein"], "Did you mean flux2?"),
        (["train", "--set", "lora.rank_pattern={a={b=4}}"], 'a pattern with dots in quotes: "mid_block.*" = 4'),
        (["train", "--max-epochs", "3"], "--set train.max_epochs=3"),
        (["train", "--max_steps", "3"], "Did you mean --max-steps"),
        (["check", "--sett", "lora.rank=3"], "Did you mean --set"),
        (["validate"], "No LoRA file is named."),
        (["sample", "a.safetensors", "--seed", "x"], "error: --seed x is not a whole number.\n"),
        (["sample", "a.safetensors", "--strength", "a b"], "error: --strength a b is not a number.\n"),
        (["sample", "a.safetensors", "--recipe", __file__], "as a recipe: it is not JSON."),
        (["presets", "12gb"], "Use: presets show 12gb"),
        (["presets", "show"], "presets show needs a name."),
        (["presets", "show", "sd16"], "Did you mean sd15?"),
        (["presets", "show", "6gb", "8gb"], "names 2 VRAM presets"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], argv: list[str], expected: str) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert expected in err


def test_check_refuses_edit_pairs_where_train_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for side in ("after", "before"):
        (tmp_path / side).mkdir()
        Image.new("RGB", (64, 64), "red" if side == "after" else "blue").save(tmp_path / side / "a.png")
    (tmp_path / "after" / "a.txt").write_text("make it red", encoding="utf-8")
    (tmp_path / "pairs.toml").write_text(
        '[[data.sources]]\npath = "after"\ncontrol_images = ["before"]\n', encoding="utf-8"
    )
    pairs = ("--config", "pairs.toml")
    for argv, model in (
        (("train", "--dry-run", *pairs), "the built-in base model"),
        (("check", *pairs), "sd15"),
        (("check", *pairs, "--set", "model.family=sdxl"), "sdxl"),
    ):
        code, _, err = run(capsys, *argv)
        assert code == 2
        assert f"1 control image for each image, and {model} takes no control images." in err
    code, out, _ = run(capsys, "check", *pairs, "--set", "model.family=flux2", "--quick")
    assert (code, "none of which can be trained" in out) == (3, True), "it is too small, but it is checked"


def test_presets_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "presets")
    assert code == 0
    assert all(f"  {name} " in out for name in ("6gb", "24gb", "auto", "quality", "sd15", "qwen_image21"))
    code, out, _ = run(capsys, "presets", "show", "12gb", "quality")
    assert code == 0
    assert row(out, "lora.rank")[1:3] == ["64", "preset 12gb"]
    assert row(out, "optimizer.learning_rate")[2] == "preset quality"
    assert row(out, "loss.min_snr_gamma")[3].startswith("published: arXiv:2303.09556")
    assert "run.output" not in out


def test_arguments_reach_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[str | None, set[str]]] = []

    def train(order: Order, *, dry_run: bool = False) -> SimpleNamespace:
        flags = {name for name in ("resume", "enforce_gates", "verbose") if getattr(order, name)}
        calls.append((order.config.run.name, flags | ({"dry_run"} if dry_run else set())))
        return SimpleNamespace(exit_code=4)

    module = ModuleType("lora_trainer.run.train")
    module.train = train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lora_trainer.run.train", module)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo-2").mkdir()
    assert main(["train", "--resume", "--name", "cat"]) == 4
    assert main(["produce", "--dry-run"]) == 4
    assert main(["demo", "-v"]) == 4
    expected = [("cat", {"resume"}), (None, {"dry_run", "enforce_gates"}), ("demo-3", {"enforce_gates", "verbose"})]
    assert calls == expected


def fails(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def broken(_arguments: object, _unknown: object) -> int:
        raise error

    monkeypatch.setitem(cli.COMMANDS, "presets", Command("", lambda parser: None, broken))


def test_other_processes_of_a_launch_are_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert run(capsys, "train", "--reume") == (2, "", "")
    assert run(capsys, "train", "--explain") == (0, "", "")


@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (DatasetRefused(Problem("planted", "too few")), 3, "error: too few\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (ZeroDivisionError("oops"), 1, "Run it again with --debug"),
        (PermissionError(13, "Permission denied", "/a/b"), 2, "/a/b: Permission denied."),
        (OSError(28, "No space left on device"), 5, "The disk is full."),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    expected: str,
) -> None:
    fails(monkeypatch, error)
    got, _, err = run(capsys, "presets")
    assert got == code
    assert expected in err


def test_in_one_pipe_an_error_comes_last(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lora_trainer", "train", "--data", str(tmp_path / "absent")]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=300)
    output = ended.stdout.decode()
    assert ended.returncode == 2
    assert 0 <= output.index("(no --model)") < output.index("error: ")


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fails(monkeypatch, ZeroDivisionError("oops"))
    assert main(["presets", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


CHEAP = """
import sys
from lora_trainer.cli.main import main
for argv in (["--help"], ["train", "--help"], ["presets"], ["train", "--preset", "12gb", "--explain"]):
    assert main(argv) == 0, argv
heavy = {"torch", "diffusers", "transformers", "accelerate", "peft"} & set(sys.modules)
assert not heavy, heavy
"""


def test_cheap_commands_load_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", CHEAP], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "lora_trainer", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: Unknown command trian.\n       Did you mean train?\n"


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "lora_trainer", "presets"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `| head` does, and before anything is printed
        assert process.stderr.read() == ""
    assert process.returncode == 1


def test_unused_flags_are_not_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, absent in (("plan", ("--resume", "--dry-run")), ("batch", ("--data", "--name"))):
        assert main([command, "--help"]) == 0
        output = capsys.readouterr().out
        assert "--preset" in output
        assert not [flag for flag in absent if f"{flag} " in output]


def test_an_empty_name_and_output_are_refused_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--name", "", "--output", ""]) == 2
    output = capsys.readouterr().err
    assert output.count("must be not empty") == 2
    assert "String" not in output


def test_a_family_without_its_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--set", "model.family=sdxl", "--max-steps", "1"]) == 2
    assert "needs --model" in capsys.readouterr().err


def test_a_folder_is_no_lora_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cat.safetensors").write_bytes(b"")
    assert main(["validate", str(tmp_path)]) == 2
    output = capsys.readouterr().err
    assert "is a folder" in output
    assert "cat.safetensors" in output


def test_a_finished_command_does_not_collect_garbage(checkout: Path) -> None:
    """With torch loaded it takes seconds, and a stopped run may have few."""
    program = (
        "import gc; from lora_trainer.__main__ import entry; entry(['--version']); print(gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=checkout, check=True)
    assert done.stdout.split()[-1] == "True"


def test_lines_are_wrapped_only_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    text = "a note of many words that is wider than the terminal of its reader"
    monkeypatch.setenv("COLUMNS", "40")
    assert folded(text, io.StringIO(), 7) == text
    lines = folded(text, Terminal(), 7).split("\n")
    assert len(lines) > 1
    assert all(line.startswith(" " * 7) and len(line) <= 40 for line in lines[1:])
    assert " ".join(line.strip() for line in lines) == text


def test_a_user_without_a_home_folder_is_refused_by_name(monkeypatch, capsys):
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert main(["check", "~/images"]) == 2
    assert "HOME" in capsys.readouterr().err


def test_a_library_of_another_torch_is_named(tmp_path: Path) -> None:
    """transformers imports torchvision where it is installed, and fails with it."""
    library = tmp_path / "torchvision"
    library.mkdir()
    (library / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    command = [sys.executable, "-m", "lora_trainer", "plan", "--data", str(draw_images(tmp_path / "images", 1))]
    around = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "torchvision::nms" in ended.stderr
    assert "pip uninstall torchvision" in ended.stderr


def test_a_library_of_another_version_is_not_called_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        exec("import json.not_there")
    assert report_error(raised.value, debug=False) == 2
    assert "not installed" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("statement", "code"), [("import not_installed.part", 2), ("import lora_trainer.not_written", 1), ("0 / 0", 1)]
)
def test_a_missing_library_is_no_bug_of_ours(capsys: pytest.CaptureFixture[str], statement: str, code: int) -> None:
    try:
        exec(statement)
    except Exception as error:  # noqa: BLE001
        found = report_error(error, debug=False)
    assert found == code
    assert ("pip install not_installed" in capsys.readouterr().err) == (code == 2)


@pytest.mark.parametrize(
    "error",
    [
        "OSError('libtorch_cpu.so: invalid ELF header')",
        "OSError('[WinError 193] %1 is not a valid Win32 application')",
        "ImportError('_C.so: undefined symbol')",
    ],
)
def test_a_torch_of_another_system_is_one_message_with_the_fix(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"raise {error}\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "lora_trainer", "train", "--output", str(tmp_path / "runs"), "--name", "a"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "torch does not load" in ended.stderr
    assert "docs/setup.md" in ended.stderr


@pytest.mark.parametrize("name", ["12GB", "Quality", "AUTO"])
def test_a_preset_in_capitals_is_offered_as_it_is_written(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert main(["train", "--preset", name]) == 2
    assert f"Did you mean {name.lower()}?" in capsys.readouterr().err
