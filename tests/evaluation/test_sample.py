"""`sample` through the command: the grid, its recipe, and refusals before a base model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image, ImageFont

from lora_trainer.cli.main import main
from lora_trainer.core.errors import UsageError
from lora_trainer.core.interrupt import Stopped
from lora_trainer.core.io import write_json
from lora_trainer.evaluation import lettering, sample
from lora_trainer.evaluation.recipe import Drawing, ImageRequest, parameters
from lora_trainer.evaluation.sheet import SheetGroup, SheetRow, contact_sheet, wrapped
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.families import FAMILIES
from lora_trainer.run.messages import readers
from tests.lora_format.tiny import facts, random_lora, tiny_pipeline, tiny_vae

QUICK = ("--num-inference-steps", "2", "--size", "64x48")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "my-model"
    tiny_pipeline(folder / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    return write_lora(tmp_path_factory.mktemp("lora"), "cat", random_lora(unet, size=0.2), facts(trigger="zobo"))[0]


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


def drawn(folder: Path, *names: str) -> list[bytes]:
    return [pixels(folder / f"cat_{name}.png") for name in names]


@pytest.fixture(scope="module")
def grid(base: Path, lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prompts, two seeds, three strengths."""
    folder = tmp_path_factory.mktemp("grid")
    prompts = ("--prompt", "[trigger] in red", "--prompt", "a blue square")
    strengths = [part for value in ("0.5", "1", "-1") for part in ("--strength", value)]
    more = ("--num-images-per-prompt", "2", "--seed", "5", "--negative-prompt", "green", "--output", str(folder))
    assert main(["sample", str(lora), "--model", str(base), *prompts, *strengths, *QUICK, *more]) == 0
    return folder


def test_the_grid_has_every_prompt_seed_and_strength(grid: Path) -> None:
    name = "before_after_00"
    assert len(list(grid.glob("cat_before_after_*_*.png"))) == 4 * 4
    columns = drawn(grid, f"{name}_without", f"{name}_with_0.5", f"{name}_with", f"{name}_with_-1")
    assert len(set(columns)) == 4
    recipe = json.loads((grid / "cat_before_after.json").read_text(encoding="utf-8"))
    requested = [(each["prompt"], each["seed"]) for each in recipe["images"]]
    assert requested == [("zobo in red", 5), ("zobo in red", 6), ("a blue square", 5), ("a blue square", 6)]
    assert (recipe["strengths"], recipe["negative"], recipe["size"]) == ([0.5, 1.0, -1.0], "green", [64, 48])
    assert set(recipe["model_sha256"]) == {"unet", "vae", "text_encoder"}
    with Image.open(grid / "cat_before_after.png") as sheet:
        assert sheet.width > 4 * 200
        assert sheet.height > 4 * 150


def test_an_image_records_its_settings_and_names_no_folder(grid: Path, base: Path) -> None:
    with Image.open(grid / "cat_before_after_01_with_0.5.png") as image:
        text = image.text  # type: ignore[attr-defined]
    lines = text["parameters"].splitlines()
    assert lines[0] == "zobo in red <lora:cat:0.5>"
    assert lines[1] == "Negative prompt: green"
    assert "Steps: 2, Sampler: DDIM, CFG scale: 7.5, Seed: 6, Size: 64x48, Model: my-model," in lines[2]
    assert json.loads(text["recipe"])["strengths"] == [0.5]
    for path in grid.glob("*.png"):
        with Image.open(path) as image:
            assert str(base.parent) not in json.dumps(image.text)  # type: ignore[attr-defined]
    with Image.open(grid / "cat_before_after_01_without.png") as image:
        assert "lora" not in image.text["parameters"].partition("\nSteps")[0]  # type: ignore[attr-defined]


def test_a_recipe_reproduces_the_image_exactly(
    grid: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = grid / "cat_before_after.json"
    assert main(["sample", str(lora), "--recipe", str(recipe), "--output", str(tmp_path)]) == 0
    assert "changed since the recipe" not in capsys.readouterr().err
    endings = [f"{row:02d}_{side}" for row in range(4) for side in ("without", "with_0.5", "with", "with_-1")]
    first = drawn(grid, *(f"before_after_{each}" for each in endings))
    assert drawn(tmp_path, *(f"again_{each}" for each in endings)) == first
    other = lora.with_name("cat.diffusers.safetensors")
    assert main(["sample", str(other), "--recipe", str(recipe), "--output", str(tmp_path / "b")]) == 2
    assert "its SHA-256 differs" in capsys.readouterr().err
    assert main(["sample", str(lora), "--recipe", str(recipe), "--num-inference-steps", "3"]) == 2
    assert "--recipe and --num-inference-steps contradict each other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--prompt", "a", "--size", "70x64"), "The nearest: 64x64"),
        (("--prompt", "a", "--size", "big"), "--size big is not a size"),
        (("--prompt", "a", "--num-images-per-prompt", "0"), "--num-images-per-prompt is 0"),
        (("--prompt", "a", "--seed", "-1"), "--seed is -1"),
        (
            ("--prompt", "a", "--num-images-per-prompt", "2", "--seed", "1", "--seed", "4"),
            "--num-images-per-prompt and several --seed",
        ),
        (("--prompt", "a", "--strength", "9"), "sample.strengths"),
        ((), "There is no prompt"),
        (("--recipe", "absent.json"), "cannot be read as a recipe"),
    ],
)
def test_wrong_settings_are_wrong_usage(
    flags: tuple[str, ...], expected: str, base: Path, lora: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(lora), "--model", str(base), *flags]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "expected"),
    [("/disk/sdxl/model", "sdxl/model"), ("/m", "m"), ("/disk/sdxl.safetensors", "sdxl.safetensors"), ("a/b", "a/b")],
)
def test_a_grid_shortens_the_name_of_its_base_model(model: str, expected: str) -> None:
    assert sample.short_path(model) == expected


@pytest.mark.parametrize("module", ["unet.mid_block.nowhere", "text_encoder.text_model.encoder.layers.0.mlp.fc1"])
def test_a_lora_of_another_family_is_refused_before_the_base_model_is_loaded(
    module: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "fresh_pipeline", lambda *_: pytest.fail("the base was loaded"))
    foreign = LoraWeights({module: LoraPair(torch.ones(2, 9), torch.ones(9, 2), 2.0)})
    path, _ = write_lora(tmp_path, "other", foreign, facts(base_version="sdxl_base_v1-0"))
    assert main(["sample", str(path), "--model", str(base), "--prompt", "a"]) == 2
    output = capsys.readouterr().err
    assert "another model family: sdxl; the base model is sd15" in output
    assert "nowhere" not in output


def test_a_header_with_another_family_is_refused_even_if_all_keys_fit(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "fresh_pipeline", lambda *_: pytest.fail("the base was loaded"))
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    path, _ = write_lora(tmp_path, "other", random_lora(unet, size=0.2), facts(base_version="sdxl_base_v1-0"))
    assert main(["sample", str(path), "--model", str(base), "--prompt", "a"]) == 2
    assert "another model family: sdxl; the base model is sd15" in capsys.readouterr().err


def test_keys_that_do_not_fit_are_summarized(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = LoraPair(torch.ones(2, 9), torch.ones(9, 2), 2.0)
    weights = LoraWeights({f"unet.down_blocks.{number}.attentions.7.proj_in": pair for number in range(8)})
    path, _ = write_lora(tmp_path, "other", weights, facts())
    assert main(["sample", str(path), "--model", str(base), "--prompt", "a"]) == 2
    output = capsys.readouterr().err
    assert "3 more keys do not fit" in output
    assert output.count("another kind of model?") == 1


def test_an_unknown_trigger_word_is_refused(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    path, _ = write_lora(tmp_path, "plain", random_lora(unet), facts(trigger=None))
    assert main(["sample", str(path), "--model", str(base), "--prompt", "a [trigger] cat"]) == 2
    assert "--set captions.trigger_word=WORD" in capsys.readouterr().err


def test_finished_images_are_kept_when_interrupted(
    base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = sample.save_image

    def save_image(path: Path, *args: object) -> None:
        if path.name.endswith("_with.png"):
            raise Stopped(130)
        true(path, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(sample, "save_image", save_image)
    flags = ("--prompt", "a ring", *QUICK, "--output", str(tmp_path))
    (tmp_path / "cat_before_after_00_with.png").write_bytes(b"of an earlier grid")
    assert main(["sample", str(lora), "--model", str(base), *flags, "--overwrite"]) == 130
    assert {path.name for path in tmp_path.iterdir()} == {
        "cat_before_after.png",
        "cat_before_after.json",
        "cat_before_after_00_without.png",
    }


def test_earlier_images_stay_where_none_can_be_generated(base: Path, lora: Path, tmp_path: Path) -> None:
    foreign = LoraWeights({"unet.mid_block.nowhere": LoraPair(torch.ones(2, 9), torch.ones(9, 2), 2.0)})
    other = write_lora(tmp_path / "other", lora.stem, foreign, facts())[0]
    output = tmp_path / "samples"
    flags = ("--model", str(base), "--prompt", "a ring", *QUICK, "--output", str(output), "--overwrite")
    assert main(["sample", str(lora), *flags]) == 0
    before = {path.name: path.read_bytes() for path in output.iterdir()}
    assert len(before) == 4
    assert main(["sample", str(other), *flags]) == 2
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_many_images_make_a_sheet_that_can_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.new("RGB", (768, 1344), "red").save(path)
    rows = [SheetRow(f"seed {seed}", [path] * 5) for seed in range(64)]
    sheet = contact_sheet("cat", "20 steps", ["base", "1", "2", "3", "4"], [SheetGroup("a prompt " * 40, rows)])
    assert sheet.width * sheet.height < 60_000_000
    assert sheet.width <= 4300


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"size": [63, 64]}, "The nearest: 64x64"),
        ({"steps": 0}, "steps"),
        ({"images": []}, "no prompt and seed each"),
        ({"strengths": ["nan"]}, "strengths"),
        ({"dtype": "int8"}, "int8"),
        ({"at_once": "x"}, "'x' at once"),
        ({"text": {"clip_skip": 99}}, "clip_skip"),
        ({"model_parts": {"vae": 3}}, "model_parts"),
    ],
)
def test_a_recipe_that_cannot_be_followed_is_wrong_usage(
    wrong: dict[str, object],
    expected: str,
    grid: Path,
    lora: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample, "fresh_pipeline", lambda *_: pytest.fail("the base was loaded"))
    found = json.loads((grid / "cat_before_after.json").read_text(encoding="utf-8"))
    write_json(tmp_path / "wrong.json", found | wrong)
    assert main(["sample", str(lora), "--recipe", str(tmp_path / "wrong.json")]) == 2
    assert expected in capsys.readouterr().err


def test_a_recipe_keeps_the_vae_and_unfinished_images_stay(
    base: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(5)
    tiny_vae().save_pretrained(tmp_path / "vae")
    kept = tmp_path / "out" / "cat_before_after_00_with.png"
    kept.parent.mkdir()
    kept.write_bytes(b"of a grid that was killed")
    arguments = ("--model", str(base), "--set", f"model.vae={tmp_path / 'vae'}", "--prompt", "a ring", *QUICK)
    assert main(["sample", str(lora), *arguments, "--output", str(tmp_path / "out")]) == 0
    recipe = tmp_path / "out" / "cat_before_after-2.json"
    assert main(["sample", str(lora), "--recipe", str(recipe), "--output", str(tmp_path / "again")]) == 0
    assert "changed since the recipe" not in capsys.readouterr().err
    assert drawn(tmp_path / "again", "again_00_with") == drawn(tmp_path / "out", "before_after-2_00_with")
    assert kept.read_bytes() == b"of a grid that was killed"
    with Image.open(tmp_path / "out" / "cat_before_after-2_00_with.png") as image:
        assert str(tmp_path) not in json.dumps(image.text)  # type: ignore[attr-defined]


def test_the_summary_names_the_same_programs_as_inspect(lora: Path) -> None:
    assert readers(lora) == "ComfyUI, A1111, Forge"
    assert readers(lora.with_name("cat.diffusers.safetensors")) == "ComfyUI"


def test_the_model_defaults_to_that_of_the_run_next_to_the_file(
    base: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cat.safetensors"
    path.write_bytes(lora.read_bytes())
    write_json(tmp_path / "run.json", {"config": {"model": {"path": str(base)}}, "data_hash": ""})
    assert main(["sample", str(path), "--prompt", "a", *QUICK]) == 0
    assert f"base model: {base}" in capsys.readouterr().err


def test_strength_zero_is_the_base_model_even_with_learned_tokens(base: Path, tmp_path: Path) -> None:
    unet = FAMILIES["sd15"].denoiser.load(base, torch.float32, torch.device("cpu"))
    weights = random_lora(unet, size=0.2)
    word = LoraWeights(weights.modules, embeddings={"<zobo>.string_to_param.*": torch.randn(2, 32)})
    path, _ = write_lora(tmp_path, "cat", word, facts())
    arguments = ("--prompt", "a <zobo>", "--strength", "1", "--strength", "0", *QUICK, "--output", str(tmp_path))
    assert main(["sample", str(path), "--model", str(base), *arguments]) == 0
    without, nothing, whole = drawn(tmp_path, *(f"before_after_00_{end}" for end in ("without", "with_0", "with")))
    assert without == nothing != whole


def test_a_recipe_with_a_relative_model_path_works_from_another_folder(
    base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(base.parent)
    asked = ("--model", base.name, "--prompt", "a ring", *QUICK, "--output", str(tmp_path))
    assert main(["sample", str(lora), *asked]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["sample", str(lora), "--recipe", "cat_before_after.json", "--output", "again"]) == 0
    assert drawn(tmp_path / "again", "again_00_with") == drawn(tmp_path, "before_after_00_with")


def test_a_file_in_place_of_the_output_folder_is_refused_before_loading(
    base: Path, lora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample, "fresh_pipeline", lambda *_: pytest.fail("the base was loaded"))
    (tmp_path / "out").touch()
    asked = ("--prompt", "a ring", *QUICK, "--output", str(tmp_path / "out"))
    assert main(["sample", str(lora), "--model", str(base), *asked]) == 2
    assert "File exists" in capsys.readouterr().err


def test_text_of_a_sheet_is_not_clipped_and_has_no_missing_glyphs(monkeypatch: pytest.MonkeyPatch) -> None:
    font = ImageFont.load_default(size=20)
    text = "word " + "x" * 300 + " last"
    lines = wrapped(text, font, 400)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(font.getlength(line) for line in lines) <= 400
    monkeypatch.setattr(lettering, "FONTS", ())
    own, _ = lettering.fonts_for("\u65e5", 20, 18)
    shown = lettering.legible("a \u65e5\u672c, \U0001f431!", own)
    assert shown == "a [2 letters: cjk], [cat face]!"
    assert not lettering.lacking(shown, own)


def test_many_strengths_wrap_to_several_rows(tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    Image.new("RGB", (64, 64), "red").save(path)
    few, many = (
        contact_sheet(
            "cat",
            "20 steps",
            [str(each) for each in range(count)],
            [SheetGroup("a", [SheetRow("seed 0", [path] * count)])],
        )
        for count in (12, 60)
    )
    assert many.width == few.width
    assert many.height > few.height + 4 * 256


def test_a_model_name_with_special_characters_is_quoted(grid: Path) -> None:
    used = json.loads((grid / "cat_before_after.json").read_text(encoding="utf-8"))
    text = parameters({**used, "model": "mine, v1: best", "lora": 'c"at.safetensors'}, ImageRequest("a", 1), 1.0)
    assert ', Model: "mine, v1: best", ' in text
    assert 'Lora hashes: "c\\"at: ' in text


def test_a_guidance_scale_below_one_uses_the_negative_prompt() -> None:
    """Z-Image's pipeline uses guidance above 0, the others above 1."""
    calls: list[dict[str, torch.Tensor]] = []

    class Pipeline:
        config: dict[str, object] = {}  # noqa: RUF012  as diffusers has it

        def __call__(self, **kwargs: torch.Tensor) -> SimpleNamespace:
            calls.append(kwargs)
            return SimpleNamespace(images=[])

    read = {name: {"embeds": torch.full((1, 3, 4), value)} for name, value in (("a", 1.0), ("b", 2.0))}
    drawing = Drawing(steps=1, guidance=0.5, size=(64, 64), negative="b")
    list(sample.draw(Pipeline(), FAMILIES["sd15"], read, [ImageRequest("a", 0)], drawing))
    assert torch.equal(calls[0]["negative_prompt_embeds"], read["b"]["embeds"])


@pytest.mark.parametrize("at_once", [1, 8])
def test_prompts_with_different_numbers_of_control_images_are_refused_before_the_first_image(at_once):
    """However many images are generated at once."""
    rows = [ImageRequest("a", 0), ImageRequest("a", 1, controls=("before.png",))]
    with pytest.raises(UsageError, match="different numbers of control images"):
        next(sample.draw(SimpleNamespace(), FAMILIES["flux2"], {}, rows, Drawing(), at_once))
