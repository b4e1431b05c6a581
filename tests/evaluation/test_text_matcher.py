"""Captions compared by a model of images and texts: a tiny CLIP that learned which caption belongs to which image."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.cli.main import main
from lora_trainer.models.text_matcher import load_text_matcher, views_of
from tests.evaluation.test_caption_fit import check, write_shapes
from tests.evaluation.tiny_encoders import SMALL, save_tiny_dino

SIDE, STEPS = 32, 60
SMALL_IMAGES = "data.resolution=128"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_shapes(tmp_path_factory.mktemp("data") / "shapes", 6)


@pytest.fixture(scope="module")
def clip(shapes: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP of one layer, trained on the shapes with their captions until it knows them."""
    folder = tmp_path_factory.mktemp("clip")
    shutil.copytree(BASE_FOLDER / "tokenizer", folder, dirs_exist_ok=True)
    image_processor = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_center_crop=True
    )
    image_processor.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {**SMALL, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    torch.manual_seed(0)
    model = CLIPModel(
        CLIPConfig(text_config=texts, vision_config={**SMALL, "image_size": SIDE, "patch_size": 8}, projection_dim=16)
    )
    captions = [path.with_suffix(".txt").read_text() for path in shapes]
    tokens = tokenizer(captions, padding="max_length", max_length=77, return_tensors="pt")
    # Each image is learned as it is seen: whole, and in parts.
    views = [view for path in shapes for view in views_of(Image.open(path).convert("RGB"))]
    pixels = image_processor(images=views, return_tensors="pt")["pixel_values"]
    own = torch.arange(len(shapes)).repeat_interleave(len(views) // len(shapes))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        loss = cross_entropy(model(pixel_values=pixels, **tokens).logits_per_image, own)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def test_the_own_caption_of_an_image_suits_it_most(clip: Path, shapes: list[Path]) -> None:
    captions = [path.with_suffix(".txt").read_text() for path in shapes]
    mismatches = load_text_matcher(clip, captions, torch.device("cpu"))
    found = torch.stack([mismatches(Image.open(path).convert("RGB")) for path in shapes])
    assert found.shape == (6, 6, 6), "images, captions, views"
    assert found.mean(2).argmin(1).tolist() == list(range(6))


def test_the_command_names_a_swapped_pair_without_a_base_model(
    clip: Path, shapes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(shapes[0].parent, tmp_path / "shapes")
    one, other = data / "1.txt", data / "4.txt"
    texts = one.read_text(), other.read_text()
    one.write_text(texts[1])
    other.write_text(texts[0])
    agreement = check(capsys, str(data), "--set", f"gates.encoder={clip}", "--set", SMALL_IMAGES)["caption_agreement"]
    assert agreement["measured"]
    assert {Path(each["path"]).name for each in agreement["doubts"][:2]} == {"1.png", "4.png"}


def test_an_encoder_that_reads_no_texts_compares_nothing(
    shapes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dino = save_tiny_dino(tmp_path / "dino")
    named = ("--set", f"gates.encoder={dino}", "--set", SMALL_IMAGES)
    assert not check(capsys, str(shapes[0].parent), *named)["caption_agreement"]["measured"]


def test_a_folder_that_is_no_encoder_is_wrong_usage(shapes: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    assert main(["check", str(shapes[0].parent), "--set", f"gates.encoder={tmp_path}"]) == 2
