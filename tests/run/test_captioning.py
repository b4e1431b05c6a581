"""Captions by a model: written where set, never overwriting, from local weights only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessorPil,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.models.captioner import load_captioner
from lora_trainer.run.captioning import Wanted, caption_images, find_wanted

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] [DEC] a cat dog on the sofa".split()
SIDE = {"height": 32, "width": 32}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BLIP with random weights."""
    folder = tmp_path_factory.mktemp("blip")
    text = {"vocab_size": len(WORDS), "encoder_hidden_size": 16, "max_position_embeddings": 32, "pad_token_id": 0}
    config = BlipConfig(
        text_config={**SMALL, **text, "bos_token_id": 5, "eos_token_id": 3, "sep_token_id": 3},
        vision_config={**SMALL, "image_size": 32, "patch_size": 16},
        projection_dim=8,
    )
    torch.manual_seed(1)
    model = BlipForConditionalGeneration(config)
    # Never ends at once, as random models may.
    torch.nn.init.constant_(model.text_decoder.cls.predictions.bias, 0.0)
    model.text_decoder.cls.predictions.bias.data[WORDS.index("cat")] = 50.0
    model.save_pretrained(folder)
    BertTokenizer(vocab={word: number for number, word in enumerate(WORDS)}, bos_token="[DEC]").save_pretrained(folder)
    BlipImageProcessorPil(size=SIDE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier that is confident about two of four labels."""
    folder = tmp_path_factory.mktemp("vit")
    labels = dict(enumerate(["safe", "red_hair", "blue sky", "tree"]))
    config = ViTConfig(
        **SMALL,
        image_size=32,
        patch_size=16,
        id2label=labels,
        label2id={name: number for number, name in labels.items()},
        problem_type="multi_label_classification",
    )
    model = ViTForImageClassification(config)
    torch.nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([3.0, 1.0, 2.0, -3.0])
    model.save_pretrained(folder)
    ViTImageProcessorPil(size=SIDE).save_pretrained(folder)
    return folder


def draw(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), "red").save(path)


def test_a_captioner_writes_a_text_for_each_image(writer: Path) -> None:
    captioner = load_captioner(writer, CPU, most_tokens=4)
    assert captioner.kind == "captions"
    assert captioner.describe([Image.new("RGB", (50, 20)), Image.new("RGB", (20, 50))]) == ["cat cat cat cat"] * 2


def test_a_tagger_writes_its_most_confident_labels_first(tagger: Path, tmp_path: Path) -> None:
    image = [Image.new("RGB", (40, 40))]
    assert load_captioner(tagger, CPU).describe(image) == ["safe, blue sky, red hair"]
    assert load_captioner(tagger, CPU, threshold=0.8).describe(image) == ["safe, blue sky"]
    assert load_captioner(tagger, CPU, threshold=0.99).describe(image) == [""]
    # A tag list next to the model sets the names; ratings are no tags.
    named = tmp_path / "named"
    shutil.copytree(tagger, named)
    (named / "selected_tags.csv").write_text(
        "tag_id,name,category,count\n1,general,9,1\n2,long_hair,0,1\n3,^_^,0,1\n4,tree,0,1\n", encoding="utf-8"
    )
    assert load_captioner(named, CPU).describe(image) == ["^_^, long hair"]


def test_captions_are_written_as_requested_and_never_overwrite(
    tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "data", tmp_path / "captions"
    draw(data / "a.png", data / "deep" / "b.png", data / "deep" / "b.jpg", data / "10_cat" / "c.png", data / "d.png")
    (data / "a.txt").write_text("mine", encoding="utf-8")
    (data / "d.caption").write_text("", encoding="utf-8")
    (data / "e.png").write_bytes(b"no image")
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    assert main(["caption", str(data), "--model", str(tagger), "--output", str(output)]) == 0
    assert "3 captions written, 2 existed, 0 images without a caption, 1 unusable images" in capsys.readouterr().out
    written = sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())
    assert written == ["10_cat/c.txt", "deep/b.jpg.txt", "deep/b.png.txt"]
    assert (output / "10_cat" / "c.txt").read_text("utf-8") == "safe, blue sky, red hair\n"
    assert {path: path.read_bytes() for path in data.rglob("*") if path.is_file()} == before
    # Again: all captions exist, and a corrected text stays.
    (output / "10_cat" / "c.txt").write_text("corrected", encoding="utf-8")
    assert main(["caption", str(data), "--model", str(tagger), "--output", str(output)]) == 0
    assert "0 captions written, 5 existed" in capsys.readouterr().out
    assert (output / "10_cat" / "c.txt").read_text("utf-8") == "corrected"
    # Next to the images only when set.
    assert main(["caption", str(data), "--model", str(tagger), "--in-place"]) == 0
    assert (data / "a.txt").read_text("utf-8") == "mine"
    assert (data / "10_cat" / "c.txt").read_text("utf-8") == "safe, blue sky, red hair\n"
    assert not (data / "d.txt").exists()


def test_a_caption_that_check_refuses_is_unchanged_and_named(
    tagger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "data", tmp_path / "captions"
    draw(data / "a.png", data / "b.png", data / "c.png")
    (data / "a.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (data / "b.txt").write_bytes(b" \n")
    for place in (["--output", str(output)], ["--in-place"]):
        assert main(["caption", str(data), "--model", str(tagger), *place]) == 0
        out, printed = capsys.readouterr()
        assert "1 captions written, 2 existed" in out
        assert "a.png has a caption file that" in printed
        assert "b.png has an empty caption" in printed
    assert (data / "a.txt").read_bytes() == b"caf\xe9"
    assert [path.name for path in output.iterdir()] == ["c.txt"]


def test_a_name_that_is_too_long_is_skipped_and_the_rest_continues(tmp_path: Path) -> None:
    long, longer = "a" * 244, "b" * 250
    draw(tmp_path / f"{long}.png", tmp_path / f"{longer}.png", tmp_path / f"{longer}.jpg", tmp_path / "c.png")
    wanted, existing, _ = find_wanted([tmp_path], None)
    done = caption_images(wanted, lambda images: ["a"] * len(images), batch=1, existing=existing)
    assert [path.name for path, _ in done.broken] == [f"{longer}.jpg", f"{longer}.png"]
    assert "too long" in done.broken[0][1]
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == [f"{long}.txt", "c.txt"]


def test_captions_of_an_image_folder_count_as_captions(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", tmp_path / "b.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "mine"}\n', encoding="utf-8")
    wanted, existing, _ = find_wanted([tmp_path], None)
    assert (wanted, existing) == ([Wanted(tmp_path / "b.png", tmp_path / "b.txt")], 1)


def test_unread_captions_are_never_overwritten(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", tmp_path / "b.png")
    (tmp_path / "a.tags").write_text("mine", encoding="utf-8")  # an extension that only captions.extension sets
    (tmp_path / "captions.jsonl").write_text('{"file_name": "b.png", "text": "mine"}\n', encoding="utf-8")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    wanted, existing, _ = find_wanted([tmp_path], None)
    assert ([each.target.name for each in wanted], existing) == (["a.txt", "b.txt"], 0)
    caption_images(wanted, lambda images: ["new"] * len(images), batch=2)
    assert {path: path.read_bytes() for path in before} == before


def test_a_batch_that_does_not_fit_is_halved_and_a_stopped_run_resumes(tmp_path: Path) -> None:
    draw(*(tmp_path / f"{number}.png" for number in range(5)))
    sizes: list[int] = []

    def describe(images: Sequence[Image.Image]) -> list[str]:
        if len(images) > 2:
            raise torch.OutOfMemoryError
        sizes.append(len(images))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return ["a"] * len(images)

    wanted, existing, _ = find_wanted([tmp_path], None)
    with pytest.raises(KeyboardInterrupt):
        caption_images(wanted, describe, batch=2, existing=existing)
    assert len(list(tmp_path.glob("*.txt"))) == 2
    wanted, existing, _ = find_wanted([tmp_path], None)
    assert (len(wanted), existing) == (3, 2)
    done = caption_images(wanted, describe, batch=3, existing=existing)
    assert (done.written, done.existing) == (3, 2)
    assert max(sizes) == 2


def test_a_folder_without_a_captioner_is_one_message(tagger: Path, writer: Path, tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(UsageError) as caught:
            load_captioner(folder, CPU)
        assert len(caught.value.problems) == 1
        return str(caught.value)

    assert "no model folder" in refusal(tmp_path / "none")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json is missing" in refusal(empty)
    assert "transformers folder" in refusal(empty)
    pickled = tmp_path / "pickled"
    shutil.copytree(tagger, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    assert "holds only pytorch_model.bin, a pickle" in refusal(pickled)
    other = tmp_path / "other"
    shutil.copytree(tagger, other)
    (other / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}', encoding="utf-8")
    assert "describes no images" in refusal(other)
    cut = tmp_path / "cut"
    shutil.copytree(writer, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-40])
    assert "model.safetensors" in refusal(cut)
    lacking = tmp_path / "lacking"
    shutil.copytree(writer, lacking)
    shutil.copy(tagger / "model.safetensors", lacking / "model.safetensors")
    assert "lacks" in refusal(lacking)


@pytest.mark.parametrize(
    ("name", "auto_map", "more"),
    [
        ("config.json", {"AutoConfig": "own.Own", "AutoModelForImageClassification": "own.Own"}, {"model_type": "own"}),
        ("preprocessor_config.json", {"AutoImageProcessor": "own.Own"}, {"image_processor_type": "Own"}),
    ],
)
def test_code_of_a_model_is_not_run_and_causes_no_prompt(
    name: str,
    auto_map: dict[str, str],
    more: dict[str, str],
    tagger: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tagger, model)
    for path in model.glob("*CPU*.json"):  # one file, by the first requested name
        path.rename(model / "preprocessor_config.json")
    described = json.loads((model / name).read_text("utf-8"))
    (model / name).write_text(json.dumps({**described, **more, "auto_map": auto_map}), encoding="utf-8")
    ran = tmp_path / "ran"
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w')\nclass Own: pass\n", encoding="utf-8")
    calls: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question="": calls.append(question) or "yes")
    draw(tmp_path / "data" / "a.png")
    assert main(["caption", str(tmp_path / "data"), "--model", str(model), "--in-place"]) == 2
    output = capsys.readouterr().err
    assert output.count("code of its own, which is never run") == 1
    assert "Traceback" not in output
    assert "bug" not in output
    assert calls == []
    assert not ran.exists()
    assert not (tmp_path / "data" / "a.txt").exists()


def test_wrong_arguments_are_reported_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "data" / "a.png")
    data = str(tmp_path / "data")
    assert main(["caption", data, "--model", "none"]) == 2
    assert "Choose where to write captions" in capsys.readouterr().err
    assert main(["caption", data, "--model", "none", "--output", f"{data}/captions"]) == 2
    assert "is inside the dataset" in capsys.readouterr().err
    assert (
        main(["caption", f"{data}/a.png", "--model", "none", "--in-place", "--batch-size", "0", "--threshold", "3"])
        == 2
    )
    output = capsys.readouterr().err
    assert "--batch-size 0 is out of range" in output
    assert "--threshold 3 is out of range" in output
    assert "--max-tokens" not in output
    assert main(["caption", f"{data}/a.png", "--model", "none", "--in-place"]) == 2
    assert "is not a folder" in capsys.readouterr().err
