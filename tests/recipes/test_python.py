"""A production run from Python as in the docs, and its refusals."""

from __future__ import annotations

import re

import pytest

from lora_trainer import ProductionTrainer
from lora_trainer.config.toml import parse_value
from lora_trainer.core.errors import DatasetRefused, LoraRefused, UsageError
from lora_trainer.run_folder.progress import Progress
from tests.conftest import needs_links
from tests.recipes.recipe import QUICK, Bench, draw_images, exported, record


def settings_of(bench: Bench, **more: object) -> dict[str, object]:
    """The quick settings of the recipes as Python values."""
    values = {name: parse_value(text) for name, text in QUICK.items()}
    values |= {"cache.dir": bench.cache, "train.max_steps": 6}
    return values | {key.replace("__", "."): value for key, value in more.items()}


def trainer_of(bench: Bench, name: str, **more: object) -> ProductionTrainer:
    return ProductionTrainer(
        bench.model, bench.data, settings=settings_of(bench, **more), output=bench.output, name=name, quiet=True
    )


@needs_links
def test_the_documented_example_runs(bench, tmp_path, monkeypatch, checkout, capsys):
    _, block = re.findall(r"^```python\n(.*?)^```", (checkout / "docs/python.md").read_text("utf-8"), re.M | re.S)
    (tmp_path / "my-sd15").symlink_to(bench.model)
    (tmp_path / "images").symlink_to(bench.data)
    monkeypatch.chdir(tmp_path)
    exec(compile(block.replace("800", "6"), "docs/python.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "lora.rank 16 from settings" in shown
    assert "optimizer.learning_rate" in shown
    assert "training 6/6 loss" in shown
    assert "validating 6/6" in shown
    assert "precision: fp32" in shown
    assert "GiB at the peak" in shown
    document = record(tmp_path / "runs" / "cat")
    assert document["status"] in ("done", "refused")
    assert document["config"]["lora"]["rank"] == 16
    assert ("cat.safetensors" in shown) or ("It is kept in" in shown)


def test_it_trains_the_same_as_the_command(finished, bench):
    seen: list[Progress] = []
    settings = settings_of(bench, checkpoint__every_n_steps=3, validation__every_n_steps=3, gates__lora_check="lite")
    trainer = ProductionTrainer(
        bench.model, bench.data, settings=settings, output=bench.output, name="first", quiet=True, progress=seen.append
    )
    result = trainer.train()
    assert (result.exit_code, result.folder) == (0, bench.folder("first"))
    assert exported(result.folder) == exported(finished.folder("first"))
    assert result.scores == record(result.folder)["scores"]
    assert result.files["kohya"].is_file()
    assert len(repr(result)) < 150 + len(str(result.folder)), "a notebook shows it in a line"
    assert "done, scores: dataset" in repr(result)
    assert result.files["report"].is_file()
    phases = list(dict.fromkeys(each.phase for each in seen))
    assert phases == ["checking", "caching", "validating", "training", "drawing"]
    assert [each.step for each in seen if each.phase == "training"] == [1, 2, 3, 4, 5, 6]
    assert seen[-1].val_loss is not None
    assert trainer.train(resume=True).exit_code == 0, "finished: nothing to do"


def test_quiet_prints_nothing(bench, capsys):
    assert trainer_of(bench, "quiet", train__max_steps=1).train().exit_code == 0
    assert capsys.readouterr().out == ""


def test_a_refusal_has_the_findings_of_the_gate(bench, tmp_path):
    data = draw_images(tmp_path / "bare")
    for caption in sorted(data.glob("*.txt"))[:4]:
        caption.unlink()
    bare = trainer_of(Bench(bench.model, data, bench.output, bench.cache), "bare", gates__lora_check="full")
    assert not bare.check().passed
    with pytest.raises(DatasetRefused, match="4 of 10 files have no caption") as refused:
        bare.produce()
    assert refused.value.report.score == bare.check().score
    idle = trainer_of(bench, "idle", optimizer__learning_rate=1e-12, train__max_steps=6, gates__lora_check="lite")
    with pytest.raises(LoraRefused, match="changes nothing") as refused:
        idle.produce()
    assert refused.value.report.parts["works"].measure.value == 0.0
    assert record(idle.folder)["status"] == "refused"


def test_all_mistakes_are_reported_at_once(bench):
    wrong = {"lora.rank": 0, "lora": {"rank": 4, "rang": 4}, "train": {"max_steps": "ten"}, "learning_rate": 1e-4}
    with pytest.raises(UsageError) as refused:
        ProductionTrainer(bench.model, bench.data, presets="12gbb", settings=wrong)
    message = str(refused.value)
    for word in ("12gbb", "lora.rank twice", "lora.rang", "train.max_steps", "optimizer.learning_rate"):
        assert word in message


def test_nested_settings_and_a_file_are_layers(bench, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("[lora]\nrank = 8\nalpha = 4.0\n", encoding="utf-8")
    trainer = ProductionTrainer(bench.model, [bench.data], config=file, settings={"lora": {"rank": 2}}, quiet=True)
    explained = {setting.name: (setting.value, setting.origin) for setting in trainer.explain()}
    assert explained["lora.rank"] == (2, "settings")
    assert explained["lora.alpha"] == (4.0, f"config {file}")
    (source,), origin = explained["data.sources"]
    assert (source["path"], origin) == (str(bench.data), "data")
    assert explained["optimizer.beta1"][1] == "default"
