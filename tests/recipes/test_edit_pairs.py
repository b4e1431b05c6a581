"""Edit pairs: control images become further tokens of the step, of the caches and of the samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, FluxKontextPipeline, QwenImageEditPlusPipeline
from PIL import Image, ImageDraw

from lora_trainer.cli.main import main
from lora_trainer.config.schema import SourceSection
from lora_trainer.core.conditioning import controls_of
from lora_trainer.core.errors import UsageError
from lora_trainer.data.images.pixels import read_shown
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import ControlImage
from lora_trainer.data.views import Framing, views_of
from lora_trainer.models.families import FAMILIES, qwen_image
from lora_trainer.models.lora_names import read_lora
from lora_trainer.run import caption_agreement, find_micro
from lora_trainer.training.micro_batch import MicroBatch
from tests.recipes.recipe import COLORS, Bench, exported, losses, record, rows, save_tiny_model

FLUX = FAMILIES["flux"]
AT_64 = {"data__resolution": 64, "lora__alpha": 4}
CPU = torch.device("cpu")


def draw_pairs(folder: Path, count: int = 6, shift: int = 0) -> Path:
    """`after` has a ring on the background that `before` shows bare; two shapes."""
    for index in range(count):
        size = ((96, 96), (120, 72))[index % 2]
        image = Image.new("RGB", size, COLORS[(index + shift) % len(COLORS)])
        ImageDraw.Draw(image).line((0, 0, size[0], index * 5), fill="black", width=4)
        for name in ("before", "after"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            if name == "after":
                ImageDraw.Draw(image).ellipse((20 + index, 20, 50, 50), fill="white", outline="black")
            image.save(folder / name / f"{index}.png")
        (folder / "after" / f"{index}.txt").write_text(f"add a ring, number {index}", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("kontext"), "flux-kontext")


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Bench:
    pairs = draw_pairs(tmp_path / "pairs")
    return Bench(model, pairs / "after", tmp_path / "runs", tmp_path / "cache")


def with_before(bench: Bench, *before: Path) -> tuple[str, ...]:
    """The flags of a run on pairs, in a config file, since a table of sources is no flag."""
    path = bench.output.parent / "pairs.toml"
    controls = [str(each) for each in before or (bench.data.parent / "before",)]
    path.write_text(f'[[data.sources]]\npath = "{bench.data}"\ncontrol_images = {json.dumps(controls)}\n', "utf-8")
    return "--config", str(path)


def run_pairs(bench: Bench, name: str, *extra: str, before: Sequence[Path] = (), **settings: object) -> int:
    arguments = bench.arguments(name, *with_before(bench, *before), *extra, **AT_64, **settings)
    at = arguments.index("--data")
    return main([*arguments[:at], *arguments[at + 2 :]])


def test_the_step_reads_the_control_and_resumes_exactly(bench):
    assert run_pairs(bench, "whole", steps=4, checkpoint__every_n_steps=2) == 0
    assert run_pairs(bench, "part", steps=2, checkpoint__every_n_steps=2) == 0
    assert run_pairs(bench, "part", "--resume", steps=4, checkpoint__every_n_steps=2) == 0
    assert losses(bench.folder("part")) == losses(bench.folder("whole"))
    assert exported(bench.folder("whole"))["kohya"] == exported(bench.folder("part"))["kohya"]
    # The same targets, captions and noise with other controls: another loss from the first step on.
    others = draw_pairs(bench.data.parent / "others", shift=3) / "before"
    assert run_pairs(bench, "other", steps=1, before=[others]) == 0
    assert losses(bench.folder("other"))[0] != losses(bench.folder("whole"))[0]
    # Without a cache of latents the controls are encoded with the images.
    assert run_pairs(bench, "fresh", steps=1, cache__latents="false") == 0
    assert losses(bench.folder("fresh"))[0] == pytest.approx(losses(bench.folder("whole"))[0], rel=1e-5)
    header = json.loads((bench.folder("whole") / "run.json").read_text())
    assert header["config"]["data"]["sources"][0]["control_images"]


def test_regularization_images_without_controls_train_beside_pairs(bench):
    """They share steps, never micro-batches: neither loses its controls or needs some."""
    plain = draw_pairs(bench.data.parent / "plain") / "after"
    path = bench.output.parent / "mixed.toml"
    pairs = f'[[data.sources]]\npath = "{bench.data}"\ncontrol_images = ["{bench.data.parent / "before"}"]\n'
    path.write_text(f'{pairs}[[data.sources]]\npath = "{plain}"\nis_reg = true\n', encoding="utf-8")
    losses_of = {}
    for name, micro in (("split", "1"), ("whole", "8")):
        settings = {**AT_64, "train__effective_batch_size": "8", "train__max_micro_batch_size": micro}
        arguments = bench.arguments(name, "--config", str(path), steps=2, **settings)
        at = arguments.index("--data")
        assert main([*arguments[:at], *arguments[at + 2 :]]) == 0
        losses_of[name] = losses(bench.folder(name))
    assert losses_of["whole"] == pytest.approx(losses_of["split"], rel=1e-4)


def test_a_changed_control_is_encoded_again(bench, capsys):
    assert run_pairs(bench, "one", steps=1) == 0
    Image.new("RGB", (96, 96), "teal").save(bench.data.parent / "before" / "0.png")
    capsys.readouterr()
    assert run_pairs(bench, "two", steps=1) == 0
    assert "encoding 1 (1 control image changed)" in capsys.readouterr().out
    assert record(bench.folder("one"))["data_hash"] != record(bench.folder("two"))["data_hash"]


def test_the_gate_names_bad_pairs(bench, monkeypatch, capsys):
    monkeypatch.setattr(caption_agreement, "FEWEST_DIFFERENT", 99)  # captions are not compared
    after, before = (bench.data.parent / name for name in ("after", "before"))
    shutil.copy(after / "0.png", before / "1.png")  # is found at the image that it is of
    (before / "2.png").unlink()
    shutil.copy(after / "3.png", before / "3.png")
    (before / "4.png").write_bytes(b"no image")
    flags = [*with_before(bench), "--model", str(bench.model), "--set", "data.resolution=64"]
    assert main(["check", *flags, "--json"]) in (0, 3)
    found = {
        (Path(file["path"]).name, finding["code"]): finding
        for file in json.loads(capsys.readouterr().out)["files"]
        for finding in file["findings"]
    }
    for name, code in (
        ("0.png", "swapped_control"),
        ("2.png", "missing_control"),
        ("3.png", "identical_control"),
        ("4.png", "unreadable_control"),
    ):
        assert found[name, code]["severity"] == "error"
        assert found[name, code]["fix"]
    assert "5.png" not in {name for name, _ in found}


def test_a_control_of_another_shape_is_noted_and_its_middle_used(bench):
    Image.new("RGB", (200, 60), "navy").save(bench.data.parent / "before" / "0.png")
    section = SourceSection(path=str(bench.data), control_images=(str(bench.data.parent / "before"),))
    manifest, findings = read_manifest([section])
    assert [(each.code, each.severity) for each in findings] == [("control_differs", "note")]
    framing = Framing((64,), 16, flip=True)
    first = manifest.samples[0]
    for view in views_of(first, framing):
        shown = read_shown(first, view)
        assert shown.controls[0].shape == shown.pixels.shape


def test_a_control_is_cut_and_mirrored_as_its_image(bench):
    sample = read_manifest([bench.data])[0].samples[0]
    itself = replace(sample, controls=(ControlImage(sample.path, None, sample.content, sample.width, sample.height),))
    for view in views_of(itself, Framing((64,), 16, crops=3, flip=True, colors=1)):
        shown = read_shown(itself, view)
        assert torch.equal(shown.controls[0], shown.pixels)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv", "list.jsonl"])
def test_columns_of_a_table_name_controls(bench, name):
    rows = [
        {"file_name": f"{index}.png", "text": f"row {index}", "source": f"../before/{index}.png"} for index in range(6)
    ]
    if name.endswith(".csv"):
        text = "file_name,text,source\n" + "".join(",".join(row.values()) + "\n" for row in rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    (bench.data / name).write_text(text, encoding="utf-8")
    source = bench.data if name.startswith("metadata") else bench.data / name
    manifest, findings = read_manifest([SourceSection(path=str(source), control_columns=("source",))])
    # Each image has a text file too, which is used where the table is only one of the folder's; both are named.
    assert {finding.code for finding in findings} == {"two_captions"}
    assert [each.controls[0].path.name for each in manifest.samples] == [each.path.name for each in manifest.samples]
    captions = SourceSection(
        path=str(bench.data), captions_file=str(bench.data / name), control_columns=("source",), default_caption="a"
    )
    assert [each.controls for each in read_manifest([captions])[0].samples] == [
        each.controls for each in manifest.samples
    ]
    with pytest.raises(UsageError, match="has all of its control images"):
        read_manifest([SourceSection(path=str(source), control_columns=("source", "second"))])


def test_control_images_of_prompts_are_checked_before_training(bench, capsys):
    before = bench.data.parent / "before"
    one, two, three = (str(before / f"{number}.png") for number in range(3))
    for files, complaint in (
        (["nowhere.png"], "no control image nowhere.png"),
        ([one, two, three], "3 control images for 2 prompts"),
        ([one, two, three, one], "2 control images for each image, and model takes 1"),
    ):
        named = {"sample__prompts": json.dumps(["a", "b"]), "sample__control_images": json.dumps(files)}
        assert run_pairs(bench, "cat", steps=1, **named) == 2
        assert complaint in capsys.readouterr().err


def test_models_that_edit_nothing_refuse_controls(bench, tmp_path, capsys):
    plain = replace(bench, model=save_tiny_model(tmp_path / "plain", "flux"))
    assert run_pairs(plain, "cat", steps=1) == 2
    assert "takes no control images" in capsys.readouterr().err


def test_predictions_are_the_pipelines(model):
    """At every step of generating an image, with a control image of another size."""
    pipeline = FLUX.pipeline.make(model, torch.float32, CPU)
    assert isinstance(pipeline, FluxKontextPipeline)
    text = FLUX.load_encoders(model, torch.float32, CPU).encode_text(["add a ring"])
    control = torch.randn(1, 16, 8, 6, generator=torch.Generator().manual_seed(0))
    steps, step = [], pipeline.scheduler.step

    def watch(velocity, t, latents, **rest):
        steps.append((velocity, t, latents))
        return step(velocity, t, latents, **rest)

    pipeline.scheduler.step = watch
    size = (64, 64)
    pipeline(
        **FLUX.pipeline.prompted(text, None),
        **FLUX.pipeline.with_controls(pipeline, size, [control]),
        width=64,
        height=64,
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=[torch.Generator().manual_seed(0)],
    )
    for velocity, t, latents in steps:
        noisy, wanted = (
            pipeline._unpack_latents(each, 64, 64, pipeline.vae_scale_factor) for each in (latents, velocity)
        )
        with torch.no_grad():
            found = FLUX.denoiser.predict(
                pipeline.transformer, noisy, t.expand(1) - 1, {**text, "control_0": control}, torch.zeros(1, 6)
            )
        torch.testing.assert_close(found, wanted)


def test_samples_show_control_target_base_and_lora(bench):
    assert run_pairs(bench, "cat", steps=1) == 0
    lora, before = bench.folder("cat") / "cat.safetensors", bench.data.parent / "before"
    flags = ["--model", str(bench.model), "--size", "64x64", "--num-inference-steps", "2", "--prompt", "add a ring"]
    assert main(["sample", str(lora), *flags, "--control-image", str(before / "0.png")]) == 0
    drawn = bench.folder("cat") / "samples"
    recipe = json.loads(next(drawn.glob("*.json")).read_text())
    assert recipe["images"][0]["controls"] == [str(before / "0.png")]
    first = Image.open(next(drawn.glob("*_00_with.png"))).tobytes()
    assert (
        main(["sample", str(lora), *flags, "--control-image", str(before / "1.png"), "--output", str(drawn / "b")]) == 0
    )
    assert Image.open(next((drawn / "b").glob("*_00_with.png"))).tobytes() != first
    again = ["sample", str(lora), "--recipe", str(next(drawn.glob("*.json"))), "--output", str(drawn / "again")]
    assert main(again) == 0
    assert Image.open(next((drawn / "again").glob("*_00_with.png"))).tobytes() == first
    assert main(["sample", str(lora), *flags, "--control-image", "nowhere.png"]) == 2


@pytest.fixture(scope="module")
def klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("klein"), "flux2")


def test_several_controls_are_read_in_their_order_and_resume_exactly(bench, klein):
    """Of FLUX.2 klein: two folders are two control images of each image."""
    bench = replace(bench, model=klein)
    folders = [bench.data.parent / "before", draw_pairs(bench.data.parent / "others", shift=3) / "before"]
    kept = {"before": folders, "checkpoint__every_n_steps": 2}
    assert run_pairs(bench, "whole", steps=4, **kept) == 0
    assert run_pairs(bench, "part", steps=2, **kept) == 0
    assert run_pairs(bench, "part", "--resume", steps=4, **kept) == 0
    assert losses(bench.folder("part")) == losses(bench.folder("whole"))
    assert exported(bench.folder("whole"))["kohya"] == exported(bench.folder("part"))["kohya"]
    first = {losses(bench.folder("whole"))[0]}
    for name, chosen in (("turned", folders[::-1]), ("one", folders[:1])):
        assert run_pairs(bench, name, steps=1, before=chosen) == 0
        first.add(losses(bench.folder(name))[0])
    assert len(first) == 3
    assert run_pairs(bench, "fresh", steps=1, before=folders, cache__latents="false") == 0
    assert losses(bench.folder("fresh"))[0] == pytest.approx(losses(bench.folder("whole"))[0], rel=1e-5)


def test_more_controls_than_the_model_reads_are_refused(bench, klein, capsys):
    bench = replace(bench, model=klein)
    assert run_pairs(bench, "cat", steps=1, before=[bench.data.parent / "before"] * 5) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "There are 5 control images for each image" in shown
    assert "takes 4 control images" in shown
    assert "Name fewer with control_images" in shown


def test_samples_of_several_controls_are_the_pipelines(bench, klein):
    """The sheet of a run, and `sample`, whose images are those that the pipeline makes of the control images themselves."""
    base = Path(shutil.copytree(klein, bench.output.parent / "base"))
    pipeline = Flux2KleinPipeline.from_pretrained(klein, local_files_only=True)
    with torch.no_grad():  # else control images change no pixel of so small a model
        for name, weight in pipeline.transformer.named_parameters():
            weight.mul_(6.0 if any(part in name for part in ("to_v", "to_out", "to_qkv_mlp_proj")) else 1.0)
    pipeline.transformer.save_pretrained(base / "transformer")
    bench = replace(bench, model=base)
    folders = [bench.data.parent / "before", draw_pairs(bench.data.parent / "others", shift=3) / "before"]
    sheet = {"sample__every_n_steps": 1, "sample__num_inference_steps": 2, "sample__count": 2}
    assert run_pairs(bench, "cat", steps=2, before=folders, **sheet) == 0
    sheets = json.loads((bench.folder("cat") / "samples" / "step-000001.json").read_text())
    assert len(sheets["images"]) == 2
    for row in sheets["images"]:
        assert [Path(each).parent for each in row["controls"]] == folders
        assert Path(row["target"]).name == Path(row["controls"][1]).name
    images = []
    for number, folder in enumerate(folders):
        images.append(Image.open(folder / "0.png").convert("RGB").resize((64, 64)))
        images[-1].save(bench.output.parent / f"control{number}.png")
    out = bench.output.parent / "out"
    flags = ["--model", str(base), "--size", "64x64", "--num-inference-steps", "3", "--prompt", "add a ring"]
    for number in range(2):
        flags += ["--control-image", str(bench.output.parent / f"control{number}.png")]
    assert main(["sample", str(bench.folder("cat") / "cat.safetensors"), *flags, "--output", str(out)]) == 0
    recipe = json.loads(next(out.glob("*.json")).read_text())
    ours = np.asarray(Image.open(next(out.glob("*_00_without.png"))), dtype=int)
    differences = []
    for chosen in (images, images[::-1]):
        theirs = pipeline(
            prompt="add a ring",
            image=chosen,
            width=64,
            height=64,
            num_inference_steps=3,
            guidance_scale=recipe["guidance"],
            generator=torch.Generator("cpu").manual_seed(recipe["images"][0]["seed"]),
        ).images[0]
        differences.append(np.abs(ours - np.asarray(theirs, dtype=int)).max())
    assert differences[0] <= 1 < 4 < differences[1]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("qwen"), "qwen_image-edit-plus")


def test_captions_that_are_read_with_control_images(bench, qwen, monkeypatch, capsys):
    """Qwen-Image-Edit: captions are cached with their control images, in each variant; dropped ones, too."""
    monkeypatch.setattr(qwen_image, "SIDE", 8)
    bench = replace(bench, model=qwen)
    folders = [bench.data.parent / "before", draw_pairs(bench.data.parent / "others", shift=3) / "before"]
    kept = {"before": folders, "checkpoint__every_n_steps": 1, "data__flip": "true", "captions__dropout": 0.3}
    assert run_pairs(bench, "whole", steps=2, **kept) == 0
    # Five images and their mirrored variants, each with its caption and without; a validation image, and the empty caption.
    assert "text embedding cache: 22 texts, encoding 22 (22 new)" in capsys.readouterr().out
    assert run_pairs(bench, "part", steps=1, **kept) == 0
    assert run_pairs(bench, "part", "--resume", steps=2, **kept) == 0
    assert "text embedding cache: 22 texts, all cached" in capsys.readouterr().out
    assert losses(bench.folder("part")) == losses(bench.folder("whole"))
    assert exported(bench.folder("whole"))["kohya"] == exported(bench.folder("part"))["kohya"]
    # A changed control image changes its captions' embeddings, too.
    Image.new("RGB", (96, 96), "teal").save(folders[1] / "0.png")
    assert run_pairs(bench, "changed", steps=1, **kept) == 0
    shown = capsys.readouterr().out
    assert "text embedding cache: 22 texts, encoding 4 (4 control images changed)" in shown


def test_the_largest_micro_batch_is_found_with_control_images(bench, qwen, monkeypatch):
    """Their latents in the denoiser, and their tokens before the caption: 196 of each here."""
    bench = replace(bench, model=qwen)
    folders = [bench.data.parent / "before", draw_pairs(bench.data.parent / "others", shift=3) / "before"]
    tried, measure = list[MicroBatch](), find_micro.measure_step

    def measure_step(context, micro, config):
        tried.append(micro)
        return measure(context, micro, config)

    monkeypatch.setattr(find_micro, "measure_step", measure_step)
    found = {"train__auto_find_micro_batch_size": "true", "train__effective_batch_size": 2}
    assert run_pairs(bench, "found", steps=1, before=folders, **found) == 0
    assert [len(micro.t) for micro in tried] == [1, 2]
    for micro in tried:
        controls = controls_of(micro.cond)
        assert [*controls] == ["control_0", "control_1"]
        assert all(each.shape == micro.latents.shape for each in controls.values())
        assert all(int(torch.logical_not(row).sum()) > 2 * 196 for row in micro.cond["padding"])


def test_runs_samples_and_gate_read_captions_with_control_images(bench, qwen, monkeypatch, capsys):
    """The loss of validation pairs falls, images are drawn, and the gate measures, at a resolution that is quick."""
    monkeypatch.setattr(qwen_image, "SIDE", 8)
    bench = replace(bench, model=qwen, data=draw_pairs(bench.data.parent, count=10) / "after")
    sheet = {"sample__num_inference_steps": 2, "sample__count": 1}
    gate = {"gates__lora_check": "lite", "validation__every_n_steps": 8}
    assert run_pairs(bench, "cat", steps=8, **sheet, **gate) == 0
    first, last = rows(bench.folder("cat"), "validation.jsonl")
    assert last["loss"] < first["loss"]
    assert "agreement" not in last, "captions are read with their own control images alone"
    measured = record(bench.folder("cat"))["lora"]
    assert measured["numbers"]["learning"]["mean"] > 0
    assert measured["parts"]["works"]["value"] == 1.0
    assert measured["numbers"]["judge"]["found"], "samples are compared with the images"
    assert json.loads((bench.folder("cat") / "samples" / "before_after.json").read_text())["images"][0]["controls"]
    # A workflow for other programs would lack the control image.
    assert not {"comfyui", "a1111"} & set(json.loads((bench.folder("cat") / "run.json").read_text())["files"])
    lora = bench.folder("cat") / "cat.safetensors"
    adapter = read_lora(lora)
    assert adapter.metadata["modelspec.architecture"] == "Qwen-Image-Edit-Plus/lora"
    for file in (lora, bench.folder("cat") / "cat.diffusers.safetensors"):
        assert len(QwenImageEditPlusPipeline.lora_state_dict(file)) == 2 * len(adapter.modules)
    flags = ["--model", str(qwen), "--size", "64x64", "--num-inference-steps", "2", "--prompt", "add a ring"]
    flags += ["--prompt", "a ring", "--output", str(bench.output / "drawn")]
    assert main(["sample", str(lora), *flags]) == 0  # without control images
    assert main(["check", *with_before(bench), "--model", str(qwen), "--set", "data.resolution=64"]) == 0
    assert "model reads each caption with its own control images" in " ".join(capsys.readouterr().out.split())
