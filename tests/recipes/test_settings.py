"""Settings that change how a run computes, and the results that they must not change."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from lora_trainer.cli.main import main
from lora_trainer.config.schema import Config
from lora_trainer.report.ending import verdict_of
from lora_trainer.report.read import read_run
from lora_trainer.run import room
from lora_trainer.run import session as session_module
from lora_trainer.training import fallbacks
from lora_trainer.training.micro_batch import MicroBatch
from tests.recipes.recipe import Bench, draw_images, exported, losses, patched, record


@pytest.mark.parametrize(("micro", "calls"), [(4, (1, 2)), (2, (2, 3)), (1, (4, 4))])
def test_micro_batches_change_neither_samples_nor_noise(micro, calls, bench):
    """Four samples of two buckets form one or two micro-batches of four, two or three of two, four of one."""
    seen: list[list[MicroBatch]] = []
    true = fallbacks.train_step

    def train_step(context, micros, *others):
        seen.append(list(micros))
        return true(context, seen[-1], *others)

    def inputs_by_timestep(size: int) -> dict[float, bytes]:
        """The timestep and noise of each sample of the first step, by its first noise value."""
        seen.clear()
        with patched(fallbacks, "train_step", train_step):
            assert (
                bench.run(f"micro-{size}", steps=1, train__effective_batch_size=4, train__max_micro_batch_size=size)
                == 0
            )
        return {
            float(micro.noise[row].flatten()[0]): b"".join(
                part[row].numpy().tobytes() for part in (micro.latents, micro.noise, micro.t, micro.cond["embeds"])
            )
            for micro in seen[0]
            for row in range(len(micro.t))
        }

    whole = inputs_by_timestep(9)
    assert len(whole) == 4
    assert inputs_by_timestep(micro) == whole
    assert calls[0] <= len(seen[0]) <= calls[1]
    (loss,), (expected,) = losses(bench.folder(f"micro-{micro}")), losses(bench.folder("micro-9"))
    assert loss == pytest.approx(expected, rel=1e-5)


def test_gradient_checkpointing_changes_nothing(bench):
    for setting in ("false", "true", 2):
        assert bench.run(f"blocks-{setting}", steps=2, memory__gradient_checkpointing=setting) == 0
    for setting in ("true", 2):
        assert losses(bench.folder(f"blocks-{setting}")) == pytest.approx(
            losses(bench.folder("blocks-false")), rel=1e-5
        )


def test_a_v_prediction_model(bench, tmp_path):
    model = tmp_path / "v"
    shutil.copytree(bench.model, model)
    scheduler = model / "scheduler" / "scheduler_config.json"
    document = json.loads(scheduler.read_text(encoding="utf-8"))
    scheduler.write_text(json.dumps(document | {"prediction_type": "v_prediction"}), encoding="utf-8")
    assert bench.run("epsilon", steps=1) == 0
    assert Bench(model, bench.data, bench.output, bench.cache).run("v", steps=1, loss__min_snr_gamma=5) == 0
    assert losses(bench.folder("v")) != losses(bench.folder("epsilon"))
    assert record(bench.folder("v"))["status"] == "done"


@pytest.mark.parametrize(
    ("targets", "present", "absent"),
    [
        ("attention", "attn1_to_q", "ff_net"),
        ("attention+ff", "ff_net_0_proj", "conv"),
        ('["*.attn2.to_k", "*.conv1"]', "resnets_0_conv1", "attn1"),
    ],
)
def test_target_modules_decide_what_is_trained(targets, present, absent, bench):
    assert bench.run("targets", steps=1, lora__target_modules=targets) == 0
    names = exported(bench.folder("targets"))["kohya"]
    assert any(present in name for name in names)
    assert not any(absent in name for name in names)


@pytest.mark.slow
def test_sampling_while_training_does_not_change_the_run(finished, bench):
    assert bench.run("first", sample__every_n_steps=2, gates__lora_check="lite") == 0
    drawn = {path.name for path in (bench.folder("first") / "samples").iterdir()}
    assert {"step-000002.png", "step-000004.png", "before_after.png"} <= drawn
    assert exported(bench.folder("first")) == exported(finished.folder("first"))


def test_the_config_of_a_run_with_presets_repeats_it(bench):
    """The VRAM preset prefers a backend that this machine may lack: the file names the one in use."""
    assert bench.run("tier", "--preset", "12gb,quality", steps=1, memory__weight_dtype=None) == 0
    config = str(bench.folder("tier") / "config.toml")
    assert main(["train", "--config", config, "--name", "again"]) == 0
    assert exported(bench.folder("again")) == exported(bench.folder("tier"))


def test_an_untrained_lora_is_refused_and_kept(bench, capsys):
    assert bench.run("idle", command="produce", steps=6, optimizer__learning_rate=1e-12, gates__lora_check="lite") == 4
    output = capsys.readouterr()
    assert "changes nothing" in output.err
    assert "Traceback" not in output.err
    document = record(bench.folder("idle"))
    assert (document["status"], document["outcome"], document["exit_code"]) == ("refused", "refused", 4)
    assert document["scores"]["lora"] == 0.0
    assert (bench.folder("idle") / "idle.safetensors").is_file()
    assert "changes nothing" in (bench.folder("idle") / "idle.refused.txt").read_text("utf-8")
    assert bench.run("idle-too", steps=1, optimizer__learning_rate=1e-12, gates__lora_check="lite") == 0, (
        "train scores, produce refuses"
    )


def test_the_note_beside_a_lora_is_named_after_its_outcome(bench, tmp_path):
    """Three images are too few to compare with. The first run ends before each of them was trained."""
    few = replace(bench, data=draw_images(tmp_path / "images", 3))
    gates = {"gates__lora": 1e-9, "gates__dataset": 0, "gates__lora_check": "lite", "validation__split": 0}
    folder = few.folder("few")
    for steps, status, more in ((1, "refused", ()), (4, "unresolved", ("--resume",))):
        assert few.run("few", *more, command="produce", steps=steps, **gates) == 4
        assert record(folder)["status"] == status
        assert [path.name for path in folder.glob("few.*.txt")] == [f"few.{status}.txt"]
        assert f"few.safetensors is {status}." in (folder / f"few.{status}.txt").read_text("utf-8")


def test_a_lora_that_has_not_seen_every_image_is_refused_by_name(bench, capsys):
    """9 of the 10 images are trained, one is for validation; an epoch has 5 steps."""
    unseen = "9 images, 4 samples trained in 2 steps: 5 images were never trained"
    low = {"gates__lora": 1e-9, "gates__lora_check": "lite"}
    assert bench.run("brief", command="produce", steps=2, **low) == 4
    output = capsys.readouterr()
    assert unseen in output.err
    assert "5 steps train each at least once" in output.err
    folder = bench.folder("brief")
    document = record(folder)
    assert (document["status"], document["exit_code"], document["lora"]["outcome"]) == ("refused", 4, "refused")
    assert unseen in document["reason"]
    # What costs no forward pass has decided, so nothing else was measured, and the report says so.
    assert document["lora"]["cost"]["forward_passes"] == 0
    assert {part["measured"] for part in document["lora"]["parts"].values()} == {False}
    assert len({part["reason"] for part in document["lora"]["parts"].values()}) == 1
    verdict = verdict_of(read_run(folder))
    assert (verdict.tone, verdict.label) == ("bad", "refused")
    assert unseen in " ".join(reason.what for reason in verdict.reasons)
    assert unseen in (folder / "brief.refused.txt").read_text("utf-8")
    assert unseen in (folder / "report.html").read_text("utf-8")
    assert (folder / "brief.safetensors").is_file()
    assert (
        main(
            [
                "validate",
                str(folder / "brief.safetensors"),
                "--set",
                "gates.lora=1e-9",
                "--set",
                "gates.lora_check=lite",
            ]
        )
        == 4
    )
    assert unseen in capsys.readouterr().out
    bench.run("brief", "--resume", command="produce", steps=5, **low)
    assert record(folder)["steps"] == 5
    assert "images_never_trained" not in {finding["code"] for finding in record(folder)["lora"]["findings"]}
    capsys.readouterr()
    assert bench.run("noted", steps=2, **low) == 0, "train notes, produce refuses"
    assert record(bench.folder("noted"))["lora"]["cost"]["forward_passes"] > 0
    assert unseen in capsys.readouterr().out
    assert "No, do not use it" in (bench.folder("noted") / "report.html").read_text("utf-8")
    assert bench.run("off", command="produce", steps=2, gates__lora=0, gates__lora_check="off") == 0, (
        "a gate of 0 refuses nothing"
    )


CHECKED = {"gates__lora": 0, "sample__count": 2, "sample__strengths": "[0.5, 1.0]"}


def test_the_lora_check_can_be_skipped(bench, capsys):
    drawn = {}
    for name in ("lite", "off"):
        assert bench.run(name, steps=5, gates__lora_check=name, **CHECKED) == 0
        drawn[name] = len(list((bench.folder(name) / "samples").glob("before_after_*.png")))
    assert drawn == {"lite": 2, "off": 0}
    kept = {name: record(bench.folder(name))["lora"]["images"] for name in drawn}
    assert [len(kept[name]) for name in drawn] == [3, 0]
    files = [
        bench.folder("lite") / row[what] for row in kept["lite"] for what in ("lora", "base", "nearest") if what in row
    ]
    assert sorted(files) == sorted((bench.folder("lite") / "samples" / "verdict").iterdir())
    assert not (bench.folder("off") / "samples").exists()
    assert exported(bench.folder("off")) == exported(bench.folder("lite"))
    lite, off = record(bench.folder("lite")), record(bench.folder("off"))
    assert lite["scores"]["lora"] is not None
    assert lite["outcome"] == lite["lora"]["outcome"] == "passed", "a gate of 0 refuses nothing"
    assert lite["lora"]["cost"]["forward_passes"] > off["lora"]["cost"]["forward_passes"] == 0
    assert (off["status"], off["scores"]["lora"], off["outcome"]) == ("done", None, None)
    assert off["config"]["gates"]["lora_check"] == "off"
    assert "before_after" not in off["files"]
    assert "Not known: the LoRA was not measured" in (bench.folder("off") / "report.html").read_text("utf-8")
    assert "LoRA: not scored" in capsys.readouterr().out


def test_a_full_lora_check_draws_and_measures_more(bench):
    found = {}
    for name in ("full", "lite"):
        assert bench.run(name, steps=5, gates__lora_check=name, **CHECKED) == 0
        drawn = list((bench.folder(name) / "samples").glob("before_after_*.png"))
        lora = record(bench.folder(name))["lora"]
        found[name] = (len(drawn), len(lora["images"]), lora["cost"]["forward_passes"])
    assert found["full"][:2] == (6, 8)
    assert found["full"][2] > found["lite"][2]


@pytest.mark.slow
def test_an_enforced_gate_needs_a_score(bench, capsys):
    assert bench.run("unmeasured", command="produce", gates__lora_check="off") == 2
    assert "Set gates.lora_check=lite or full, or gates.lora=0" in capsys.readouterr().err
    assert not bench.folder("unmeasured").exists()
    assert bench.run("unmeasured", command="produce", steps=5, gates__lora_check="off", gates__lora=0) == 0


def test_old_checkpoints_are_deleted(bench):
    assert bench.run("pruned", checkpoint__every_n_steps=1, checkpoint__keep_last=2) == 0
    kept = sorted(path.name for path in (bench.folder("pruned") / "checkpoints").glob("step-*"))
    assert kept == ["step-000005", "step-000006"]


def test_a_time_limit_ends_the_run_cleanly(bench, capsys):
    assert bench.run("hours", "--max-hours", "1e-9", steps=50) == 0
    document = record(bench.folder("hours"))
    assert document["status"] == "done"
    assert 1 <= document["steps"] < 50
    assert ["train.max_hours" in event["message"] for event in document["events"]] == [True]
    assert (bench.folder("hours") / "hours.safetensors").is_file()


def test_too_little_disk_space_is_refused_before_training(bench, capsys, monkeypatch):
    assert bench.run("large", steps=4, checkpoint__every_n_steps=2) == 0
    written = sum(path.stat().st_size for path in bench.folder("large").rglob("*.safetensors"))
    monkeypatch.setattr(room, "free_bytes", lambda _: written // 4)
    capsys.readouterr()
    assert bench.run("full", steps=4, checkpoint__every_n_steps=2) == 2
    captured = capsys.readouterr()
    assert "Checkpoints and the LoRA need" in captured.err
    assert f"{written // 4 / 1e6:.1f} MB free" in captured.err
    assert "checkpoint.keep_last" in captured.err
    assert not bench.folder("full").exists()
    assert bench.run("full", "--dry-run", steps=4) == 2
    assert "Checkpoints and the LoRA need" in capsys.readouterr().err
    config, shapes = Config(), [(64, 64)]
    assert room.room_for(config, bench.folder("large"), shapes, 4, 4).needed == 0  # what is there counts
    assert room.room_for(config, bench.folder("full"), shapes, 0, 4).needed > 12 * 64 * 64


def test_control_c_before_training_is_not_a_failure(bench, capsys):
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    with patched(session_module, "fill_caches", interrupted):
        assert bench.run("early") == 130
    assert "stopped before the first step; the caches are kept" in capsys.readouterr().out
    document = record(bench.folder("early"))
    assert (document["status"], document["exit_code"], document["steps"]) == ("stopped", 130, 0)
    assert bench.run("early", "--resume", steps=1) == 0
