"""Captions by a model: written where set, overwriting only where set, from local weights or with consent to a download."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.errors import UsageError
from lora_trainer.data.captions import settled, variant_taken
from lora_trainer.data.manifest import read_manifest
from lora_trainer.models.captioner import CaptionOptions, load_captioner
from lora_trainer.models.known_captioners import KNOWN_CAPTIONERS
from lora_trainer.run.captioner_files import find_captioner
from lora_trainer.run.captioning import OverwriteJournal, Wanted, caption_images, find_wanted, finisher
from tests.run import tiny_captioners
from tests.run.local_hub import LocalHub, local_hub

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
    captioner = load_captioner(writer, CPU, CaptionOptions(max_tokens=4))
    assert captioner.kind == "captions"
    assert captioner.describe([Image.new("RGB", (50, 20)), Image.new("RGB", (20, 50))]) == [["cat cat cat cat"]] * 2
    # A prompt is the beginning of the sentence.
    begun = load_captioner(writer, CPU, CaptionOptions(prompt="a dog", max_tokens=2))
    assert begun.describe([Image.new("RGB", (50, 20))]) == [["a dog cat cat"]]


def test_a_tagger_writes_its_most_confident_labels_first(tagger: Path, tmp_path: Path) -> None:
    image = [Image.new("RGB", (40, 40))]

    def tags(**options: Any) -> list[list[str]]:
        return load_captioner(tagger, CPU, CaptionOptions(**options)).describe(image)

    assert tags() == [["safe, blue sky, red hair"]]
    assert tags(threshold=0.8) == [["safe, blue sky"]]
    assert tags(threshold=0.99) == [[]]
    assert tags(blacklist=("Blue_Sky", "tree")) == [["safe, red hair"]]
    assert tags(blacklist=("safe", "blue sky", "red_hair")) == [[]]
    # A tag list next to the model sets the names; ratings are no tags.
    named = tmp_path / "named"
    shutil.copytree(tagger, named)
    (named / "selected_tags.csv").write_text(
        "tag_id,name,category,count\n1,general,9,1\n2,long_hair,0,1\n3,^_^,0,1\n4,tree,0,1\n", encoding="utf-8"
    )
    assert load_captioner(named, CPU, CaptionOptions()).describe(image) == [["^_^, long hair"]]


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
    wanted, _, _ = find_wanted([tmp_path], None)
    done = caption_images(wanted, lambda images: [["a"]] * len(images), batch=1)
    assert [path.name for path, _ in done.broken] == [f"{longer}.jpg", f"{longer}.png"]
    assert "too long" in done.broken[0][1]
    assert sorted(path.name for path in tmp_path.glob("*.txt")) == [f"{long}.txt", "c.txt"]


def test_images_that_would_share_a_caption_file_are_refused(tagger: Path, tmp_path: Path) -> None:
    output = tmp_path / "captions"
    one, two = tmp_path / "one/img", tmp_path / "two/img"
    draw(one / "cat.png", two / "cat.png", two / "dog.png")
    for journal in (None, OverwriteJournal.of_command(tmp_path)):
        with pytest.raises(UsageError) as caught:
            find_wanted([one, two], output, journal)
        assert [each.code for each in caught.value.problems] == ["caption_shared"]
    assert main(["caption", str(one), str(two), "--model", str(tagger), "--output", str(output)]) == 2
    assert not output.exists()
    # Beside the images, and where one of them needs no caption, each has its own file.
    assert len(find_wanted([one, two], None)[0]) == 3
    (one / "cat.txt").write_text("mine", encoding="utf-8")
    assert [each.image for each in find_wanted([one, two], output)[0]] == [two / "cat.png", two / "dog.png"]
    # The same folder twice is one set of images.
    assert {each.image for each in find_wanted([two, two], output)[0]} == {two / "cat.png", two / "dog.png"}
    draw(tmp_path / "three/cat.jpg", tmp_path / "three/cat.png", tmp_path / "three/cat.png.webp")
    with pytest.raises(UsageError):
        find_wanted([tmp_path / "three"], None)


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
    caption_images(wanted, lambda images: [["new"]] * len(images), batch=2)
    assert {path: path.read_bytes() for path in before} == before


def test_a_batch_that_does_not_fit_is_halved_and_a_stopped_run_resumes(tmp_path: Path) -> None:
    draw(*(tmp_path / f"{number}.png" for number in range(5)))
    sizes: list[int] = []

    def describe(images: Sequence[Image.Image]) -> list[list[str]]:
        if len(images) > 2:
            raise torch.OutOfMemoryError
        sizes.append(len(images))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return [["a"]] * len(images)

    wanted, existing, _ = find_wanted([tmp_path], None)
    with pytest.raises(KeyboardInterrupt):
        caption_images(wanted, describe, batch=2)
    assert len(list(tmp_path.glob("*.txt"))) == 2
    wanted, existing, _ = find_wanted([tmp_path], None)
    assert (len(wanted), existing) == (3, 2)
    done = caption_images(wanted, describe, batch=3)
    assert (done.written, existing) == (3, 2)
    assert max(sizes) == 2


def test_a_folder_without_a_captioner_is_one_message(tagger: Path, writer: Path, tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(UsageError) as caught:
            load_captioner(folder, CPU, CaptionOptions())
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
    output = capsys.readouterr().err
    assert "Choose where to write captions" in output
    assert "neither a folder nor a known captioner" in output
    model = str(tmp_path)
    assert main(["caption", data, "--model", model, "--output", f"{data}/captions"]) == 2
    assert "is inside the dataset" in capsys.readouterr().err
    assert (
        main(["caption", f"{data}/a.png", "--model", "none", "--in-place", "--batch-size", "0", "--threshold", "3"])
        == 2
    )
    output = capsys.readouterr().err
    assert "--batch-size 0 is out of range" in output
    assert "--threshold 3 is out of range" in output
    assert "--max-tokens" not in output
    assert main(["caption", f"{data}/a.png", "--model", model, "--in-place"]) == 2
    assert "is not a folder" in capsys.readouterr().err


CHATS = {"qwen25_vl": "<|vision_start|><|image_pad|><|vision_end|>", "qwen3_vl": "<|image_pad|>", "joycaption": "_69|>"}


@pytest.mark.parametrize("name", ["florence2", *CHATS])
def test_an_architecture_loads_and_its_answers_depend_on_image_and_prompt(name: str, tmp_path: Path) -> None:
    folder = getattr(tiny_captioners, name)(tmp_path / "model")

    def answers(images: Sequence[Image.Image], **options: Any) -> list[list[str]]:
        found = load_captioner(folder, CPU, CaptionOptions(max_tokens=12, **options))
        assert found.kind == "captions"
        return found.describe(images)

    images = [Image.linear_gradient("L").resize((60, 40)).convert("RGB"), Image.new("RGB", (90, 90), "blue")]
    once = answers(images)
    assert [len(each) for each in once] == [1, 1]
    assert once == answers(images)
    assert once[0] != once[1]
    # The question is not repeated in the answer.
    if name != "florence2":
        assert "What is it?" not in str(answers(images, prompt="What is it?"))
    # The same without the other image beside it, padded or not.
    assert answers(images[1:]) == once[1:]
    several = answers(images, candidates=4)
    assert [each[0] for each in several] == [each[0] for each in once]
    assert all(1 < len(set(each)) == len(each) <= 4 for each in several)
    assert answers(images[1:], candidates=4) == several[1:]
    assert answers(images, candidates=4, length="long") != several
    assert answers(images, candidates=4, prompt="What is it?") != several


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_has_one_place_for_the_image(name: str, tmp_path: Path) -> None:
    from lora_trainer.models.captioner import _in_chat, _load_reader

    folder = getattr(tiny_captioners, name)(tmp_path / "model")
    model_type = json.loads((folder / "config.json").read_text("utf-8"))["model_type"]
    reader, _ = _load_reader(folder, model_type)
    text = _in_chat(folder, reader, "What is it?")
    assert text.count(CHATS[name]) == 1
    assert text.count("What is it?") == 1
    assert "type" not in text
    # Some models have the template in the tokenizer's own file.
    for path in folder.glob("chat_template.*"):
        path.unlink()
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = reader.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    assert _in_chat(folder, _load_reader(folder, model_type)[0], "What is it?") == text
    with pytest.raises(UsageError) as caught:
        _in_chat(folder, reader, f"What is {reader.image_token}?")
    assert [each.code for each in caught.value.problems] == ["prompt_invalid"]


def test_a_wd14_tagger_reads_bgr_squares_with_white_borders(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    # Of five labels the first one, a tag, depends on blue; the second is a rating.
    folder = tiny_captioners.wd14(tmp_path / "wd14", [-10.0, 9.0, 2.0, 1.0, -3.0])
    rows = [
        "tag_id,name,category,count",
        "1,blue_theme,0,1",
        "2,general,9,1",
        "3,^_^,0,1",
        "4,red_hair,0,1",
        "5,tree,4,1",
    ]
    (folder / "selected_tags.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    colors = [Image.new("RGB", (40, 40), color) for color in ("blue", "red", "black")]
    # White borders are blue in part.
    colors.append(Image.new("RGB", (20, 80), "black"))
    found = load_captioner(folder, CPU, CaptionOptions())
    assert found.kind == "tags"
    tags = found.describe(colors)
    assert tags == [["blue theme, ^_^, red hair"], ["^_^, red hair"], ["^_^, red hair"], ["blue theme, ^_^, red hair"]]
    strict = load_captioner(folder, CPU, CaptionOptions(threshold=0.8, blacklist=("^_^",)))
    assert strict.describe(colors[:2]) == [["blue theme"], []]
    # What is not such a network is one message.
    for damage in (b"", b"no network"):
        (folder / "model.onnx").write_bytes(damage)
        with pytest.raises(UsageError) as caught:
            load_captioner(folder, CPU, CaptionOptions())
        assert [each.code for each in caught.value.problems] == ["model_not_loaded"]


def test_a_wd14_tagger_with_a_fixed_batch_size_is_sent_such_batches(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    images = [Image.new("RGB", (40, 40), color) for color in ("blue", "red", "blue")]
    for batch in (1, 2, 4):
        folder = tiny_captioners.wd14(tmp_path / str(batch), [-10.0, 2.0], batch)
        (folder / "selected_tags.csv").write_text("name,category\nblue,0\ntree,0\n", encoding="utf-8")
        found = load_captioner(folder, CPU, CaptionOptions())
        assert found.describe(images) == [["blue, tree"], ["tree"], ["blue, tree"]]


def test_a_wd14_tagger_that_cannot_be_used_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    folder = tiny_captioners.wd14(tmp_path / "wd14", [-10.0, 2.0])
    names = folder / "selected_tags.csv"
    for text in (b"name,category\ncaf\xe9,0\ntree,0\n", b"name,category\ncat,0\n"):
        names.write_bytes(text)
        with pytest.raises(UsageError) as caught:
            load_captioner(folder, CPU, CaptionOptions())
        assert [each.code for each in caught.value.problems] == ["captioner_invalid"]
    names.write_bytes(b"name,category\ncat,0\ntree,0\n")
    found = load_captioner(folder, CPU, CaptionOptions())

    def fail(*_: object) -> None:
        raise onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument("a kernel is missing")

    monkeypatch.setattr(onnxruntime.InferenceSession, "run", fail)
    with pytest.raises(UsageError) as caught:
        found.describe([Image.new("RGB", (40, 40))])
    assert [each.code for each in caught.value.problems] == ["captioner_invalid"]


@pytest.mark.parametrize(
    ("options", "flags"),
    [({"prompt": "x", "length": "long"}, 2), ({"max_tokens": 3}, 1), ({"candidates": 2}, 1)],
)
def test_a_tagger_refuses_options_of_captions(options: dict[str, Any], flags: int, tagger: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_captioner(tagger, CPU, CaptionOptions(**options))
    assert [each.code for each in caught.value.problems] == ["option_not_for_model"] * flags


@pytest.mark.parametrize("options", [{"threshold": 0.5, "blacklist": ("a",)}, {"length": "long"}])
def test_a_captioner_refuses_options_that_it_does_not_read(options: dict[str, Any], writer: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_captioner(writer, CPU, CaptionOptions(**options))
    assert {each.code for each in caught.value.problems} == {"option_not_for_model"}
    assert len(caught.value.problems) == len(options)


def test_prefix_and_trigger_word_are_put_where_training_puts_them() -> None:
    assert finisher("", None, several=False)("a {cat}") == "a {cat}"
    assert finisher("photo of", "sks", several=False)("a cat") == "sks, photo of a cat"
    assert finisher("photo of [trigger],", "sks", several=False)("a cat") == "photo of sks, a cat"
    assert finisher("", "sks", several=False)("a SKS cat") == "a SKS cat"


def test_one_candidate_is_trained_at_a_time_and_each_equally_often(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", tmp_path / "b.png")
    wanted, _, _ = find_wanted([tmp_path], None)
    texts = [["a {cat}", "one | two", "a red cat"], ["a dog"]]
    caption_images(wanted, lambda images: texts, batch=2, finish=finisher("", "sks", several=True))
    assert (tmp_path / "b.txt").read_text("utf-8") == "sks, a dog\n"
    rules = CaptionsSection(wildcards=True)
    sample, other = settled(read_manifest([tmp_path], captions=rules)[0].samples, [rules])
    taken = [sample.texts[variant_taken(sample, use, seed=1)] for use in range(len(sample.texts) * 3)]
    assert set(taken) == {"sks, a {cat}", "sks, one | two", "sks, a red cat"}
    assert sample.caption == "sks, a {cat}"  # for validation: the first, which is not a random one
    assert other.texts == ("sks, a dog",)


def test_overwriting_replaces_the_caption_that_is_read_and_continues_after_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_TRAINER_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    draw(*(data / f"{name}.png" for name in "abcd"), data / "d.jpg")
    for name in ("a.txt", "b.caption", "c.png.txt", "d.txt"):
        (data / name).write_text(f"my own {name}", encoding="utf-8")
    journal = OverwriteJournal.of_command(data)
    wanted, existing, _ = find_wanted([data], None, journal)
    assert sorted(each.target.name for each in wanted) == ["a.txt", "b.caption", "c.png.txt", "d.jpg.txt", "d.png.txt"]
    assert existing == 0
    calls: list[int] = []

    def describe(images: Sequence[Image.Image]) -> list[list[str]]:
        calls.append(len(images))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return [["new"]] * len(images)

    with pytest.raises(KeyboardInterrupt):
        caption_images(wanted, describe, batch=2, journal=journal)
    # Another command begins anew; the same one continues, whatever became of a line.
    with open(journal.path, "ab") as file:
        file.write(b"\xff\0\n")
    assert len(find_wanted([data], None, OverwriteJournal.of_command(data, "other"))[0]) == 5
    wanted, existing, _ = find_wanted([data], None, OverwriteJournal.of_command(data))
    assert (len(wanted), existing) == (3, 2)
    done = caption_images(wanted, describe, batch=2, journal=journal)
    assert (done.written, existing) == (3, 2)
    assert {path.read_text("utf-8") for path in data.glob("*.caption")} == {"new\n"}
    # A finished run is forgotten: the next one overwrites all.
    assert len(find_wanted([data], None, journal)[0]) == 5
    assert (data / "d.txt").read_text("utf-8") == "my own d.txt"  # that of both images


def test_captions_are_overwritten_only_where_set(tagger: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    draw(data / "a.png", data / "b.png")
    (data / "a.txt").write_text("mine", encoding="utf-8")
    command = ["caption", str(data), "--model", str(tagger), "--in-place", "--trigger-word", "sks"]
    assert main(command) == 0
    assert (data / "a.txt").read_text("utf-8") == "mine"
    assert (data / "b.txt").read_text("utf-8") == "sks, safe, blue sky, red hair\n"
    assert main([*command, "--overwrite"]) == 0
    assert (data / "a.txt").read_text("utf-8") == "sks, safe, blue sky, red hair\n"


def test_known_captioners_are_listed_with_size_and_license(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (checkout / "docs" / "captions.md").read_text("utf-8")
    assert [name for name in KNOWN_CAPTIONERS if f"`{name}`" not in page] == []
    assert [name for name, each in KNOWN_CAPTIONERS.items() if f"{each.gigabytes:g} GB" not in page] == []
    assert main(["caption", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("florence-2-base", "qwen2.5-vl-7b", "qwen3-vl-4b", "joycaption", "blip-large", "wd-swinv2-v3"):
        (line,) = [each for each in lines if each.startswith(f"{name} ")]
        assert " GB " in line
        assert "/" in line


@pytest.fixture
def hub(writer: Path, tmp_path: Path) -> Iterator[LocalHub]:
    """A hub with a model in the place of one that is known by name."""
    with local_hub(tmp_path / "hf") as running:
        running.holds("florence-community/Florence-2-base", writer)
        running.repositories["florence-community/Florence-2-base"] |= {"pytorch_model.bin": b"pickle", "own.py": b"x"}
        yield running


def test_a_known_captioner_is_downloaded_with_consent_and_later_found(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    draw(data / "a.png", data / "b.png")
    command = ["caption", str(data), "--model", "florence-2-base", "--in-place", "--max-tokens", "4"]
    # Without a terminal nobody can agree: nothing is downloaded or written.
    assert main(command) == 2
    error = capsys.readouterr().err
    for part in ("florence-community/Florence-2-base", "0.5 GB", "MIT", "--yes"):
        assert part in error
    # A full disk is named before the download.
    with monkeypatch.context() as full:
        full.setattr("lora_trainer.run.captioner_files.free_bytes", lambda folder: 1000)
        assert main([*command, "--yes"]) == 2
        assert "1 KB free" in capsys.readouterr().err
    assert hub.requests == []
    assert list(data.glob("*.txt")) == []
    # One that was refused in the middle continues.
    hub.status["model.safetensors"] = (403, "")
    assert main([*command, "--yes"]) == 2
    assert "Traceback" not in capsys.readouterr().err
    hub.status.clear()
    assert main([*command, "--yes"]) == 0
    assert len(list(data.glob("*.txt"))) == 2
    assert not {"pytorch_model.bin", "own.py"} & set(hub.fetched())
    # Now it is here: no consent, no request.
    hub.requests.clear()
    (data / "a.txt").unlink()
    assert main([*command, "--offline"]) == 0
    assert (data / "a.txt").exists()
    # Offline, one that is not here is refused with consent too.
    (data / "a.txt").unlink()
    assert main([*command[:3], "florence-2-large", "--in-place", "--yes"]) == 2
    assert "offline" in capsys.readouterr().err
    assert hub.requests == []


def test_a_download_that_stopped_at_a_small_file_is_completed(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(*, offline: bool = False) -> Path:
        return find_captioner("florence-2-base", offline=offline, consent=lambda about: True, say=[].append)

    hub.status["tokenizer_config.json"] = (403, "")
    with pytest.raises(UsageError):
        find()
    assert "model.safetensors" not in hub.fetched()
    hub.status.clear()
    folder = find()
    names = {path.name for path in folder.iterdir()}
    # Another program left files out: the disk needs room for these alone.
    for missing in ("tokenizer.json", "preprocessor_config.json"):
        (folder / missing).unlink()
        with pytest.raises(UsageError):
            find(offline=True)
        gigabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e9
        small = replace(KNOWN_CAPTIONERS["florence-2-base"], gigabytes=gigabytes)
        with monkeypatch.context() as patch:
            patch.setitem(KNOWN_CAPTIONERS, "florence-2-base", small)
            patch.setattr("lora_trainer.run.captioner_files.free_bytes", lambda folder: 10)
            assert find() == folder
        assert {path.name for path in find(offline=True).iterdir()} == names


def test_in_a_terminal_the_user_is_asked(
    hub: LocalHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "data" / "a.png")
    command = ["caption", str(tmp_path / "data"), "--model", "florence-2-base", "--in-place", "--max-tokens", "4"]
    monkeypatch.setattr("lora_trainer.cli.caption.is_terminal", lambda stream: True)
    for answer, code in (("", 2), ("no\n", 2), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(command) == code
        assert "[y/N]" in capsys.readouterr().err
        assert bool(hub.fetched()) == (code == 0)


@pytest.mark.parametrize(
    ("status", "code"), [((401, "GatedRepo"), "hub_gated"), ((404, "RepoNotFound"), "hub_model_missing")]
)
def test_a_captioner_that_the_hub_refuses_is_one_message(
    status: tuple[int, str], code: str, hub: LocalHub, tmp_path: Path
) -> None:
    hub.status["florence-community"] = status
    with pytest.raises(UsageError) as caught:
        find_captioner("florence-2-base", offline=False, consent=lambda about: True, say=[].append)
    assert [each.code for each in caught.value.problems] == [code]


def test_a_repository_without_safetensors_is_refused(hub: LocalHub) -> None:
    del hub.repositories["florence-community/Florence-2-base"]["model.safetensors"]
    with pytest.raises(UsageError) as caught:
        find_captioner("florence-2-base", offline=False, consent=lambda about: True, say=[].append)
    assert [each.code for each in caught.value.problems] == ["model_missing"]
    assert "pytorch_model.bin" not in hub.fetched()


@pytest.mark.parametrize(
    ("named", "code", "part"),
    [("florence-2-bse", "captioner_unknown", "florence-2-base"), ("./none", "model_missing", "--list")],
)
def test_a_name_that_is_unknown_is_answered_with_near_ones(named: str, code: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_captioner(named, offline=False, consent=lambda about: True, say=[].append)
    assert [each.code for each in caught.value.problems] == [code]
    assert part in str(caught.value)
