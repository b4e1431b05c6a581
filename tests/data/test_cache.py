from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.cli.cache import prune_command, status_command
from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.errors import DatasetRefused, TrainingFailed
from lora_trainer.data.caches.cache import (
    CachePlan,
    Filled,
    fill_latents,
    fill_texts,
    plan_latents,
    plan_texts,
    text_keys,
)
from lora_trainer.data.caches.entries import Store
from lora_trainer.data.caches.files import entry_path
from lora_trainer.data.caches.pruning import cache_clean, cache_status
from lora_trainer.data.captions import canonical, settled
from lora_trainer.data.manifest import read_manifest
from lora_trainer.data.sample import Mask, Sample
from lora_trainer.data.views import Framing, plan_plain
from tests.data.conftest import Draw

HALF = torch.float16


def encode_image(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """[B, 3, H, W] -> two [B, 4, H / 8, W / 8]: block means."""
    assert pixels.ndim == 4
    assert pixels.abs().max() <= 1
    mean = torch.nn.functional.avg_pool2d(pixels, 8)
    mean = torch.cat([mean, mean[:, :1]], dim=1)
    return mean, torch.full_like(mean, 0.1)


def encode_text(captions: Sequence[str]) -> dict[str, Tensor]:
    return {"embeds": torch.stack([torch.full((5, 3), float(len(caption))) for caption in captions])}


def plan_of(
    data: Path, cache: Path, *, resolution: int = 64, encoder: str = "vae", dtype: torch.dtype = HALF
) -> CachePlan:
    manifest, _ = read_manifest([data])
    plan = plan_plain(manifest.samples, [Framing((resolution,), 16)])
    shown = [(sample, views[0]) for sample, views in zip(manifest.samples, plan.views, strict=True)]
    return plan_latents(shown, cache, encoder, dtype)


def fill(data: Path, cache: Path, **settings: object) -> Filled:
    return fill_latents(plan_of(data, cache, **settings), encode_image, batch=2)  # type: ignore[arg-type]


def texts_of(data: Path, cache: Path, encoder: str = "clip") -> CachePlan[str]:
    manifest, _ = read_manifest([data])
    return plan_texts(manifest.samples, ["a prompt"], cache, encoder, HALF)


@pytest.fixture
def data(tmp_path: Path, draw: Draw) -> Path:
    folder = tmp_path / "data"
    for seed, (width, height) in enumerate([(64, 64), (96, 64), (64, 64), (70, 140), (64, 64)]):
        draw(folder / f"{seed}.png", width, height, seed=seed, caption=f"{'x' * seed} thing")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_latents_are_built_once_and_read_back(data: Path, cache: Path) -> None:
    before = sorted(data.rglob("*"))
    assert fill(data, cache) == Filled("latents", 0, 5, {"new": 5})
    assert fill(data, cache) == Filled("latents", 5, 0, {})
    plan = plan_of(data, cache)
    store = Store(cache, "latents")
    for (_, view), key in zip(plan.items, plan.keys, strict=True):
        entry = store.read(key)
        assert (
            entry["mean"].shape == entry["spread"].shape == (4, view.fit.bucket.height // 8, view.fit.bucket.width // 8)
        )
        assert entry["mean"].dtype == HALF
    assert sorted(data.rglob("*")) == before


def test_planning_writes_nothing_and_a_full_cache_needs_no_encoder(data: Path, cache: Path) -> None:
    assert plan_of(data, cache).filled.rebuilt == 5
    assert not cache.exists()
    fill(data, cache)

    def never(pixels: Tensor) -> tuple[Tensor, Tensor]:
        raise AssertionError

    assert fill_latents(plan_of(data, cache), never, batch=2).rebuilt == 0


def test_the_reason_is_reported(data: Path, cache: Path, draw: Draw) -> None:
    fill(data, cache)
    draw(data / "0.png", seed=70)
    draw(data / "2.png", seed=71)
    draw(data / "new.png", seed=72)
    assert fill(data, cache).line == "latent cache: 6 images, encoding 3 (2 images changed, 1 new)"
    assert fill(data, cache, resolution=48).reasons == {"size changed": 6}
    assert fill(data, cache, resolution=48, encoder="other").reasons == {"new for this encoder": 6}
    assert fill(data, cache, resolution=48, encoder="other", dtype=torch.float32).reasons == {"precision changed": 6}
    assert fill(data, cache).rebuilt == 0


def test_pruned_entries_are_not_reported_as_changed(data: Path, cache: Path) -> None:
    fill(data, cache)
    shown = [(replace(sample, mask=Mask(None)), view) for sample, view in plan_of(data, cache).items]
    masked = plan_latents(shown, cache, "vae", HALF)
    assert fill_latents(masked, encode_image, batch=2).reasons == {"mask changed": 5}
    fill(data, cache)  # known already, so nothing is stored again
    cache_clean(cache, limit=0)
    assert fill(data, cache).reasons == {"not in the cache any more": 5}


def test_caption_options_are_not_cached_as_captions(data: Path, cache: Path) -> None:
    def settled_texts(**options: object) -> dict[str, int]:
        samples = settled(read_manifest([data])[0].samples, [CaptionsSection(**options)])
        measured = tuple(map(canonical, samples[:2]))
        plan = plan_texts((*samples, *measured), (), cache, "clip", HALF)
        return fill_texts(plan, encode_text, batch=4).reasons

    (data / "0.txt").write_text("a, b, c, d, e", encoding="utf-8")
    assert settled_texts() == {"new": 6}
    assert settled_texts(shuffle=True, variants=4) == {"caption options changed": 4}
    assert settled_texts(shuffle=True, variants=5) == {"caption options changed": 1}
    (data / "0.txt").write_text("a, b, c, d, f", encoding="utf-8")
    assert settled_texts(shuffle=True, variants=5) == {"caption changed": 6}  # with the canonical one
    cache_clean(cache, limit=0)
    assert set(settled_texts(shuffle=True, variants=5)) == {"not in the cache any more"}


def test_names_and_places_do_not_matter(data: Path, cache: Path) -> None:
    fill(data, cache)
    (data / "0.png").rename(data / "renamed.png")
    (data / "0.txt").rename(data / "renamed.txt")
    moved = data.rename(data.with_name("moved"))
    assert fill(moved, cache).rebuilt == 0


def test_copies_share_an_entry(data: Path, cache: Path, draw: Draw) -> None:
    draw(data / "copy.png", seed=0)
    assert fill(data, cache) == Filled("latents", 0, 5, {"new": 5})


def files_of(cache: Path, kind: str = "latents") -> list[Path]:
    return sorted((cache / kind).rglob("*.safetensors"))


def flip_last_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "header", "another's"])
def test_a_damaged_entry_is_built_again_alone(data: Path, cache: Path, damage: str) -> None:
    fill(data, cache)
    plan = plan_of(data, cache)
    path, whole = entry_path(cache, "latents", plan.keys[0]), Store(cache, "latents").read(plan.keys[0])
    raw, other = path.read_bytes(), entry_path(cache, "latents", plan.keys[1]).read_bytes()
    hurt = {"empty": b"", "cut": raw[:-10], "text": b"nonsense" * 10, "header": raw[:20] + b"?" + raw[21:]}
    path.write_bytes(hurt.get(damage, other))
    assert fill(data, cache) == Filled("latents", 4, 1, {"damaged": 1})
    assert fill(data, cache).rebuilt == 0
    assert torch.equal(Store(cache, "latents").read(plan.keys[0])["mean"], whole["mean"])
    assert cache_status(cache).kinds["latents"].damaged == 1
    assert cache_clean(cache).removed == 1
    assert cache_status(cache).kinds["latents"].damaged == 0
    assert fill(data, cache).rebuilt == 0


def test_damage_in_a_large_cache_is_found_and_rebuilt_when_read(
    data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_trainer.data.caches.cache.CHECKED_AT_START", 0)
    fill(data, cache)
    plan = plan_of(data, cache)
    flip_last_bit(entry_path(cache, "latents", plan.keys[2]))
    assert fill(data, cache).rebuilt == 0
    store = Store(cache, "latents")
    store.read(plan.keys[0])
    with pytest.raises(TrainingFailed, match="built anew when the run starts again"):
        store.read(plan.keys[2])
    assert fill(data, cache) == Filled("latents", 4, 1, {"damaged": 1})
    assert store.read(plan.keys[2])["mean"].dtype == HALF


def test_verifying_finds_what_no_run_has_read(data: Path, cache: Path) -> None:
    fill(data, cache)
    flip_last_bit(files_of(cache)[3])
    assert cache_clean(cache).damaged == 0
    assert cache_clean(cache, verify=True).damaged == 1
    assert cache_status(cache).counts["latents"] == 4
    assert fill(data, cache).rebuilt == 1


def test_a_removed_entry_is_rebuilt(data: Path, cache: Path) -> None:
    fill(data, cache)
    files_of(cache)[1].unlink()
    assert fill(data, cache).reasons == {"not in the cache any more": 1}


def test_files_of_an_earlier_version_are_not_read(data: Path, cache: Path) -> None:
    """Many entries a file: what they held is built again, which the reason says, and pruning removes them."""
    fill(data, cache)
    for path in files_of(cache):
        path.unlink()
    kind = cache / "latents"
    claim = cache / "building" / ("ab" * 32 + ".0")
    former = [kind / ("ab" * 16 + ".safetensors"), kind / ("ab" * 16 + ".damaged-3"), claim]
    claim.parent.mkdir()
    for path in former:
        path.touch()
    save_file({"crc": torch.zeros(2, dtype=torch.int64), "keys": torch.zeros(2, 32, dtype=torch.uint8)}, former[0])
    assert fill(data, cache).reasons == {"cached by an earlier version": 5}
    assert fill(data, cache).rebuilt == 0
    assert cache_status(cache).former == 3
    assert cache_clean(cache).removed == 3
    assert not any(path.exists() for path in former)
    assert cache_status(cache).counts["latents"] == 5


def test_a_damaged_index_only_costs_the_explanation(data: Path, cache: Path) -> None:
    fill(data, cache)
    (cache / "index.sqlite").write_text("[broken", encoding="utf-8")
    assert fill(data, cache).rebuilt == 0
    assert fill(data, cache, resolution=48).reasons == {"size changed": 5}


def test_an_interrupted_fill_keeps_what_it_built(data: Path, cache: Path) -> None:
    calls = 0

    def stops(pixels: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise KeyboardInterrupt
        return encode_image(pixels)

    with pytest.raises(KeyboardInterrupt):
        fill_latents(plan_of(data, cache), stops, batch=2)
    assert fill(data, cache).rebuilt == 3


def test_two_runs_may_fill_at_once(data: Path, cache: Path) -> None:
    plans = [plan_of(data, cache) for _ in range(3)]
    threads = [threading.Thread(target=fill_latents, args=(plan, encode_image, 1)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fill(data, cache).rebuilt == 0
    assert not list(cache.rglob("*.part"))


def test_an_image_that_changes_meanwhile_is_refused(data: Path, cache: Path, draw: Draw) -> None:
    plan = plan_of(data, cache)
    draw(data / "0.png", seed=99)
    with pytest.raises(DatasetRefused, match=r"0\.png changed"):
        fill_latents(plan, encode_image, batch=2)
    (data / "0.png").write_bytes(b"")
    with pytest.raises(DatasetRefused, match=r"0\.png is empty"):
        fill_latents(plan, encode_image, batch=2)


def test_nonfinite_values_stop_the_run(data: Path, cache: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"not finite for 0\.png.*memory\.weight_dtype"):
        fill_latents(plan_of(data, cache), lambda pixels: (encode_image(pixels)[0] / 0, pixels), batch=5)
    assert cache_status(cache).bytes == 0


def test_a_cache_folder_that_is_a_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(TrainingFailed, match=r"cache\.dir"):
        fill(data, tmp_path / "cache")


def test_texts_always_include_the_empty_one(data: Path, cache: Path) -> None:
    filled = fill_texts(texts_of(data, cache), encode_text, batch=4)
    assert filled == Filled("texts", 0, 7, {"new": 7})
    assert fill_texts(texts_of(data, cache), encode_text, batch=4).rebuilt == 0
    store, plan = Store(cache, "texts"), texts_of(data, cache)
    keys = dict(zip(plan.items, plan.keys, strict=True))
    for caption in ("", "a prompt", "xx thing"):
        entry = store.read(keys[caption])
        assert entry["embeds"].shape == (5, 3)
        assert float(entry["embeds"][0, 0]) == len(caption)
    (data / "3.txt").write_text("changed", encoding="utf-8")
    assert (
        fill_texts(texts_of(data, cache), encode_text, batch=4).line
        == "text embedding cache: 7 texts, encoding 1 (1 caption changed)"
    )
    assert fill_texts(texts_of(data, cache, "clip2"), encode_text, batch=4).reasons == {"new for this encoder": 7}


def test_progress_counts_to_the_end(data: Path, cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    fill_latents(plan_of(data, cache), encode_image, 2, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5, 5)
    assert seen == sorted(seen)


def test_an_entry_lost_during_a_run_is_explained(cache: Path) -> None:
    with pytest.raises(TrainingFailed, match="built anew when the run starts again"):
        Store(cache, "latents").read("ab" * 32)


def test_an_entry_is_one_file_that_any_program_reads(data: Path, cache: Path) -> None:
    fill_latents(plan_of(data, cache), encode_image, batch=2)
    plan = plan_of(data, cache)
    assert files_of(cache) == sorted(entry_path(cache, "latents", key) for key in plan.keys)
    entry = load_file(entry_path(cache, "latents", plan.keys[0]))
    assert torch.equal(entry["spread"], torch.full((4, 8, 8), 0.1, dtype=HALF))


def test_status_and_cleaning(data: Path, cache: Path) -> None:
    assert cache_status(cache).bytes == 0
    fill(data, cache)
    fill_texts(texts_of(data, cache), encode_text, batch=4)
    status = cache_status(cache)
    assert status.counts == {"latents": 5, "texts": 7, "features": 0}
    assert status.bytes == sum(path.stat().st_size for kind in ("latents", "texts") for path in files_of(cache, kind))
    oldest = files_of(cache)[1]
    os.utime(oldest, (1, 1))
    left_over = oldest.parent / f".{oldest.name[:32]}.abc.part"
    left_over.write_bytes(b"123")
    os.utime(left_over, (1, 1))
    assert cache_clean(cache, status.bytes - 1).removed == 2
    assert not oldest.exists()
    assert not left_over.exists()
    assert cache_clean(cache, 0).left_bytes == 0
    assert cache_status(cache).counts == {"latents": 0, "texts": 0, "features": 0}


def test_reused_entries_count_as_used(data: Path, cache: Path) -> None:
    fill(data, cache)
    path = files_of(cache)[0]
    os.utime(path, (1, 1))
    fill(data, cache)
    assert path.stat().st_mtime > 1


def test_the_commands(data: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(data, cache)
    assert status_command(cache) == 0
    assert "5 latents, 0 texts" in capsys.readouterr().out
    assert status_command(cache, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"latents": 5, "texts": 0, "features": 0}
    assert prune_command(cache, 0.0) == 0
    assert "5 files removed" in capsys.readouterr().out


def test_text_entries_are_shared_by_encoder_settings(cache: Path) -> None:
    """Weights in use make another entry. The same text from other settings does not."""

    def keys(*texts: str, weighted: bool = False) -> tuple[str, ...]:
        sample = Sample(Path("a.png"), "first", 8, 8, "0" * 64, variants=texts, weighted=weighted)
        plan = plan_texts([sample, replace(sample, variants=())], [], cache, "clip", HALF)
        assert text_keys(plan, [sample, replace(sample, variants=())])[1] == (plan.keys[-2],)
        return text_keys(plan, [sample, replace(sample, variants=())])[0]

    literal, plain = keys("(cat:1.3)", "cat")
    assert keys("(cat:1.3)", weighted=True) not in ((literal,), (plain,))
    assert keys("(cat:1.3)", weighted=True) != keys("(cat:1.2)", weighted=True)
    assert keys("cat", "(cat:1.0)", weighted=True) == (plain, plain)
    assert keys(r"\(cat:1.3\)", weighted=True) == (literal,)
