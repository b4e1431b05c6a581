"""The gate on real files and a tiny base model: broken, untrained and harmful files fail."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.adapters.target_modules import target_modules
from lora_trainer.core.errors import UsageError
from lora_trainer.core.io import read_json
from lora_trainer.evaluation import lora_check, sample
from lora_trainer.evaluation.compute import ON_CPU, Compute
from lora_trainer.evaluation.evidence import Effort, RealImages
from lora_trainer.evaluation.faults import FAULTS
from lora_trainer.evaluation.judge import OTHER
from lora_trainer.evaluation.lora_check import (
    ADDED_WORDS,
    LoraGate,
    check_lora,
    not_comparable,
    places_of,
    with_added_words,
)
from lora_trainer.evaluation.lora_report import LoraReport
from lora_trainer.evaluation.prediction import in_parts
from lora_trainer.evaluation.recipe import Drawing, Grid, ImageRequest, NamedModel
from lora_trainer.evaluation.sample import Where, compare
from lora_trainer.evaluation.sample_rates import BY_SAMPLES
from lora_trainer.evaluation.validation_loss import EncodedSample, validation_losses
from lora_trainer.evaluation.verdict import LINE, SCALES, VerdictPart
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.reading import read_lora
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import write_lora
from lora_trainer.models.drawing import read_prompts
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import Encoders, Family
from lora_trainer.models.memory.phases import Placement
from tests.lora_format.tiny import facts, random_lora, weights_from_peft

FAMILY = FAMILIES["sd15"]
CPU = torch.device("cpu")
PROMPTS = ("", "a red circle")


@pytest.fixture(scope="module")
def samples() -> list[EncodedSample]:
    generator = torch.Generator().manual_seed(3)
    common, text = torch.randn(4, 8, 8, generator=generator), torch.randn(77, 32, generator=generator)
    latents = [0.8 * common + 0.2 * torch.randn(4, 8, 8, generator=generator) for _ in range(6)]
    return [EncodedSample(f"s{i}", value, {"embeds": text}, torch.zeros(6)) for i, value in enumerate(latents)]


@pytest.fixture(scope="module")
def trained(base: Path, samples: list[EncodedSample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA trained for a few steps on four of the six samples."""
    unet = FAMILY.denoiser.load(base, torch.float32, CPU)
    parameters = inject_lora(unet, target_modules(unet, FAMILY.denoiser, "attention"), AdapterOptions(4, 8.0), 0)
    process = FAMILY.denoiser.make_process(base)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3)
    latents = torch.stack([sample.latents for sample in samples[:4]])
    text = samples[0].cond["embeds"].expand(4, -1, -1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        noise, t = torch.randn(4, 4, 8, 8, generator=generator), torch.randint(0, 1000, (4,), generator=generator)
        prediction = unet(process.add_noise(latents, noise, t), t, text, return_dict=False)[0]
        (prediction - noise).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = weights_from_peft(unet.state_dict(), FAMILY.denoiser.component, 8.0)
    return write_lora(tmp_path_factory.mktemp("lora"), "trained", weights, facts())[0]


def read_unet(base: Path) -> torch.nn.Module:
    return FAMILY.denoiser.load(base, torch.float32, CPU)


def check(lora: Path, base: Path, images: RealImages, compute: Compute = ON_CPU, family: Family = FAMILY) -> LoraReport:
    return check_lora(lora, base, family, images, LoraGate(check="lite", prompts=PROMPTS), compute)


def codes(report: LoraReport) -> set[str]:
    return {finding.code for finding in report.findings}


def test_a_trained_lora_is_measured_in_every_part(trained: Path, base: Path, samples: list[EncodedSample]) -> None:
    progress: list[tuple[int, int]] = []
    images = RealImages(samples[:4], samples[4:])
    report = check(trained, base, images, Compute(progress=lambda *share: progress.append(share)))
    assert progress == [(done + 1, len(progress)) for done in range(len(progress))]
    assert report.cost.forward_passes == len(progress)
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert document["cost"]["seconds"] > 0
    assert list(document["parts"]) == list(SCALES)
    for name, part in document["parts"].items():
        assert part["measured"] is (report.parts[name].measure is not None)
        assert not part["measured"] or 0 <= part["low"] <= part["value"] <= part["high"] <= 1
    assert document["parts"]["works"]["value"] == 1.0
    learning = document["numbers"]["learning"]
    assert 0 < learning["low"] < learning["mean"] < learning["high"]
    assert {name for name, (_, of) in document["numbers"]["judge"]["found"].items() if of} == {*FAULTS, OTHER}
    lowest = min(part["value"] for part in document["parts"].values() if part["measured"])
    assert document["score"] == round(lowest, 4)
    again = check(trained.with_name("trained.diffusers.safetensors"), base, images)
    assert again.score == report.score


def test_where_captions_are_alike_half_of_the_prompts_have_words_added(samples: list[EncodedSample]) -> None:
    """One caption for all: the LoRA may know its subject by this caption alone, and in no longer prompt."""
    alike = [replace(sample, caption="a zobo") for sample in samples]
    assert [each.caption for each in with_added_words(alike)] == [f"a zobo, {words}" for words in ADDED_WORDS]
    weighted = [replace(sample, caption=(("a zobo", 1.2),)) for sample in samples]
    assert with_added_words(weighted)[0].caption == (("a zobo", 1.2), (ADDED_WORDS[0], 1.0))
    assert with_added_words([*alike, replace(samples[0], caption="a red zobo")]) == []
    assert with_added_words(alike[:3]) == []
    places = places_of(range(16), 6, 10)
    assert [place >= 6 for place in places] == [False, False, True, True] * 4
    assert {place for place in places if place >= 6} == {6, 7, 8, 9}
    assert set(places_of(range(24), 6, 10)) == set(range(10)), "all images, also of an even number"
    assert set(places_of(range(12), 6, 6)) == set(range(6))


@pytest.mark.parametrize(("images", "prompts"), [(4, 4), (6, 10), (22, 22)])
def test_two_seeds_have_one_prompt(images: int, prompts: int) -> None:
    places = places_of(range(48), images, prompts)
    assert places[0::2] == places[1::2]
    assert places[:12] == places_of(range(12), images, prompts)
    assert places[12:24] == places_of(range(12, 24), images, prompts), "rounds are counted on"


@pytest.mark.slow
def test_progress_is_counted_exactly_where_images_have_several_shapes(
    trained: Path, base: Path, samples: list[EncodedSample]
) -> None:
    progress: list[tuple[int, int]] = []
    cut = [replace(sample, latents=sample.latents[:, : 8 - 2 * (i % 3)]) for i, sample in enumerate(samples)]
    report = check(trained, base, RealImages(cut[:4], cut[4:]), Compute(progress=lambda *share: progress.append(share)))
    assert progress == [(done + 1, len(progress)) for done in range(len(progress))]
    bands = report.numbers["learning"]["by_noise"]
    assert list(bands) == ["low", "mid", "high"]
    assert all(band["low"] <= band["mean"] <= band["high"] for band in bands.values())


def test_the_gate_measures_the_effect_of_the_file(trained: Path, base: Path, samples: list[EncodedSample]) -> None:
    """The losses in the report are those of the base model without and with the file's updates."""
    report = check(trained, base, RealImages((), samples))
    unet = FAMILY.denoiser.load(base, torch.float32, CPU)
    process = FAMILY.denoiser.make_process(base)

    def loss() -> float:
        losses = validation_losses(
            lambda *args: FAMILY.denoiser.predict(unet, *args), samples, process, seed=20_240_229, timesteps=8
        )
        return float(losses.mean())

    learning = report.numbers["learning"]
    assert learning["base"] == pytest.approx(loss(), rel=1e-5)
    for name, pair in read_lora(trained).modules.items():
        unet.get_submodule(name.removeprefix("unet.")).weight.data += pair.delta()
    assert learning["lora"] == pytest.approx(loss(), rel=1e-4)


def test_what_is_not_measured_is_named_and_leaves_the_score(
    trained: Path, base: Path, samples: list[EncodedSample]
) -> None:
    itself = check(trained, base, RealImages(samples))
    assert itself.numbers["learning"] is None
    few = check(trained, base, RealImages(samples[:3]))
    none = check(trained, base, RealImages())
    assert few.parts["shows"].reason != none.parts["shows"].reason
    for report, fix in ((few, "Add images"), (none, "--data")):
        assert report.parts["works"].measure
        assert not any(report.parts[name].measure for name in BY_SAMPLES)
        (finding,) = (each for each in report.findings if each.code == "not_compared")
        assert report.parts["shows"].reason in finding.message
        assert fix in finding.fix
        assert not {f"{name}_not_measured" for name in BY_SAMPLES} & codes(report)
        assert report.outcome != "passed"


@pytest.mark.slow
def test_the_planned_forward_passes_are_exact_in_every_round_and_without_what_is_cached(
    trained: Path, base: Path, samples: list[EncodedSample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(lora_check.LORA_CHECKS, "full", Effort(4, 8, 2, 2))
    # One part that never is decided: every round is measured.
    monkeypatch.setattr(VerdictPart, "outcome", lambda part, minimum=LINE: part.measure and "unresolved")
    gate, images = LoraGate(prompts=PROMPTS, cache=tmp_path), RealImages(samples[:4], samples[4:])
    counts = []
    for _ in range(2):
        seen: list[tuple[int, int]] = []
        said: list[str] = []
        compute = Compute(progress=lambda *share, to=seen: to.append(share), say=said.append)
        report = check_lora(trained, base, FAMILY, images, gate, compute)
        assert [line for line in said if "4 samples of at most 8" in line]
        assert [done for done, _ in seen] == list(range(1, len(seen) + 1))
        assert seen[-1] == (len(seen), len(seen)) == (report.cost.forward_passes,) * 2
        complete = [done for done, total in seen if done == total]
        assert len(complete) == 3  # at the end of each round, and of the samples that are shown without the LoRA
        if not counts:  # nothing is cached: the total of a round is known at its start
            assert len({total for done, total in seen if complete[0] < done <= complete[1]}) == 1
        counts.append(len(seen))
    assert counts[1] < counts[0]


def test_untrained(base: Path, samples: list[EncodedSample], tmp_path: Path) -> None:
    weights = random_lora(FAMILY.denoiser.load(base, torch.float32, CPU))
    untrained = LoraWeights({n: LoraPair(p.down, torch.zeros_like(p.up), 2.0) for n, p in weights.modules.items()})
    report = check(write_lora(tmp_path, "new", untrained, facts())[0], base, RealImages(samples[:4], samples[4:]))
    assert (report.score, report.outcome) == (0.0, "refused")
    assert codes(report) == {"changes_nothing"}
    assert {part.reason for name, part in report.parts.items() if name != "works"} == {"the LoRA does not work"}


def test_ruined(base: Path, samples: list[EncodedSample], tmp_path: Path) -> None:
    weights = random_lora(FAMILY.denoiser.load(base, torch.float32, CPU), size=3.0)
    report = check(write_lora(tmp_path, "wild", weights, facts())[0], base, RealImages(samples[:4], samples[4:]))
    assert report.outcome != "passed"
    assert {"drift", "large_update"} <= codes(report)


def test_nan_scores_nothing(trained: Path, base: Path, samples: list[EncodedSample], tmp_path: Path) -> None:
    tensors = load_file(trained)
    key = next(key for key in tensors if "lora_up" in key)
    tensors[key][0, 0] = float("nan")
    save_file(tensors, tmp_path / "nan.safetensors")
    report = check(tmp_path / "nan.safetensors", base, RealImages(samples))
    assert report.score == 0.0
    assert codes(report) == {"not_finite"}


UNLOADED = replace(
    FAMILY,
    encoders=replace(FAMILY.encoders, load=lambda *_: pytest.fail("encoders were loaded")),
    pipeline=replace(FAMILY.pipeline, make=lambda *_: pytest.fail("the base was loaded")),
)


@pytest.mark.parametrize(
    ("name", "findings"),
    [("unet.down_blocks.{}.attentions.7.proj_in", 6), ("text_encoder.text_model.encoder.layers.{}.mlp.fc1", 6)],
)
def test_keys_of_another_base_model_are_refused_before_it_is_loaded(
    name: str, findings: int, base: Path, tmp_path: Path
) -> None:
    pair = LoraPair(torch.ones(2, 9), torch.ones(9, 2), 2.0)
    weights = LoraWeights({name.format(i): pair for i in range(8)})
    report = check_lora(write_lora(tmp_path, "other", weights, facts())[0], base, UNLOADED, RealImages())
    assert report.score == 0.0
    assert codes(report) == {"key_does_not_fit"}
    assert len(report.findings) == findings


def test_a_file_that_diffusers_cannot_load_is_a_finding(base: Path, tmp_path: Path) -> None:
    """Its own form with `.alpha`, and a text encoder's part alone without any `out_proj`."""
    tensors = load_file(write_lora(tmp_path, "cat", random_lora(read_unet(base)), facts())[1])
    alphas = {f"{key.removesuffix('.lora_A.weight')}.alpha": torch.tensor(2.0) for key in tensors if "lora_A" in key}
    save_file(tensors | alphas, tmp_path / "alpha.safetensors")
    name = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    only = LoraWeights({name: LoraPair(torch.ones(2, 32), torch.ones(32, 2), 2.0)})
    for path in (tmp_path / "alpha.safetensors", write_lora(tmp_path, "text", only, facts())[0]):
        report = check(path, base, RealImages())
        assert codes(report) == {"not_loaded_whole"}
        assert "ValueError" in report.findings[0].message


def test_a_file_that_is_no_lora_is_wrong_usage(base: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        check(tmp_path / "absent.safetensors", base, RealImages())


def test_splitting_rows_does_not_change_the_result() -> None:
    calls: list[int] = []

    def predict(noisy: torch.Tensor, t: torch.Tensor, cond: object, sizes: torch.Tensor) -> torch.Tensor:
        calls.append(len(noisy))
        return noisy * t.view(-1, 1, 1, 1) + cond["x"] + sizes.sum(1).view(-1, 1, 1, 1)  # type: ignore[index]

    for side, rows in ((32, [2, 2, 1]), (16, [5])):
        noisy, t, sizes = torch.randn(5, 1, side, side), torch.arange(5), torch.randn(5, 6)
        cond = {"x": torch.randn(5, 1, 1, 1)}
        whole = predict(noisy, t, cond, sizes)
        calls.clear()
        assert torch.equal(in_parts(predict, noisy, t, cond, sizes), whole)
        assert calls == rows


@pytest.mark.slow
def test_encoders_of_the_gate_are_freed_before_the_pipeline_loads(trained: Path, base: Path) -> None:
    encoders_alive: list[weakref.ref[Encoders]] = []

    def load_encoders(*arguments: Any) -> Encoders:
        encoders = FAMILY.encoders.load(*arguments)
        encoders_alive.append(weakref.ref(encoders))
        return encoders

    def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> object:
        assert [encoders() for encoders in encoders_alive] == [None]
        return FAMILY.pipeline.make(folder, dtype, device)

    family = replace(
        FAMILY,
        encoders=replace(FAMILY.encoders, load=load_encoders),
        pipeline=replace(FAMILY.pipeline, make=make_pipeline),
    )
    assert check(trained, base, RealImages(), family=family).parts["works"].outcome() == "passed"


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 2), ("cuda", 1)])
def test_a_gpu_generates_one_image_at_a_time(
    device: str, at_once: int, trained: Path, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The pipeline itself stays on the CPU here."""
    monkeypatch.setattr(sample, "bring_pipeline", lambda *_: Placement(None, False, False, 0))
    monkeypatch.setattr(sample, "read_prompts", lambda *args: read_prompts(*args[:3]))
    drawn: list[int] = []
    pipelines: list[weakref.ref[DiffusionPipeline]] = []

    def make_pipeline(folder: Path, dtype: torch.dtype, device: torch.device) -> DiffusionPipeline:
        pipeline = FAMILY.pipeline.make(folder, dtype, CPU)
        pipeline.unet.register_forward_pre_hook(lambda _, args: drawn.append(len(args[0])))
        pipelines.append(weakref.ref(pipeline))
        return pipeline

    family = replace(FAMILY, pipeline=replace(FAMILY.pipeline, make=make_pipeline))
    drawing = Drawing(steps=2, guidance=3.0, size=(64, 64))
    rows = [ImageRequest(prompt, seed) for prompt, seed in zip(PROMPTS, (1, 2), strict=True)]
    compute = Compute(device=torch.device(device))
    compare(NamedModel(family, base), trained, Grid(rows, drawing), Where(tmp_path, "grid"), compute)
    assert len(list(tmp_path.glob("*_without.png"))) == 2
    assert set(drawn) == {2 * at_once}  # guidance needs two forward passes
    assert pipelines[0]() is None


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.convert("RGB").tobytes()


def test_before_and_after(trained: Path, base: Path, tmp_path: Path) -> None:
    rows = [ImageRequest("a red circle", 1), ImageRequest("a blue square on a white background", 2)]
    drawing, where = Drawing(steps=2, guidance=3.0, size=(64, 64)), Where(tmp_path, "before_after")
    model, grid = NamedModel(FAMILY, base), Grid(rows, drawing)
    compare(model, trained, grid, where)
    whole = pixels(where.image(0, None))
    assert whole != pixels(where.image(0, 1.0))
    assert read_json(where.recipe)["images"][1] == {"prompt": rows[1].prompt, "seed": 2}
    with Image.open(where.sheet) as image:
        assert image.width >= 2 * 256
        assert image.height >= 2 * 256
    second = pixels(where.image(1, None))
    kept = Image.new("RGB", (64, 64), "red")
    kept.save(where.image(1, None))
    again = Where(tmp_path, "c")  # whose base images are taken from the first
    compare(model, trained, grid, again)
    assert [pixels(again.image(index, None)) for index in (0, 1)] == [whole, kept.tobytes()]
    alone = Where(tmp_path, "alone")
    compare(model, trained, Grid(rows[1:], drawing), alone)
    difference = torch.tensor(list(pixels(alone.image(0, None)))).int() - torch.tensor(list(second)).int()
    assert difference.abs().max() <= 2  # alone or in a batch, the same image up to rounding


@pytest.mark.slow
def test_a_second_verdict_reads_what_depends_on_the_base_alone(
    trained: Path, base: Path, samples: list[EncodedSample], tmp_path: Path
) -> None:
    """Bit for bit the same with and without the cache, in fewer forward passes."""
    images = RealImages(samples[:4], samples[4:])
    gate = LoraGate(check="lite", prompts=PROMPTS)
    plain, first, second = (
        check_lora(trained, base, FAMILY, images, replace(gate, cache=cache)) for cache in (None, tmp_path, tmp_path)
    )
    documents = [report.to_json() for report in (plain, first, second)]
    assert documents[0]["parts"] == documents[1]["parts"] == documents[2]["parts"]
    assert documents[0]["numbers"] == documents[2]["numbers"]
    assert first.cost.forward_passes == plain.cost.forward_passes
    assert second.cost.forward_passes < plain.cost.forward_passes


def test_what_other_code_measured_is_not_read(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of the judge are kept with what else depends on the base: those of another measure would be wrong."""
    process = FAMILY.denoiser.make_process(base)
    studio = SimpleNamespace(sampler=SimpleNamespace(process=process), dtype=torch.float32, device=torch.device("cpu"))
    keys = [lora_check.model_key(studio, base, FAMILY, None)]
    for code in ("a = 1", "a = 1", "a = 2"):
        (tmp_path / "judge.py").write_text(code, encoding="utf-8")
        monkeypatch.setattr(lora_check, "__file__", str(tmp_path / "lora_check.py"))
        keys.append(lora_check.model_key(studio, base, FAMILY, None))
    assert keys[1] == keys[2]
    assert len(set(keys)) == 3


def test_images_that_the_autoencoder_does_not_keep_leave_the_verdict_open(
    trained: Path, base: Path, samples: list[EncodedSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora_check, "LEAST_DECIBELS", 24.0)
    kept, lost = (not_comparable(RealImages(samples, decibels=decibels)) for decibels in (24.0, 23.9))
    assert kept is None
    assert lost is not None
    report = check(trained, base, RealImages(samples[:4], samples[4:], 23.9))
    assert not any(report.parts[name].measure for name in BY_SAMPLES)
    assert report.outcome != "passed"
    assert "not_compared" in codes(report)
    assert (report.numbers["judge"], report.cannot_tell) == (None, ())
    assert report.numbers["images"]["decibels"] == 23.9
