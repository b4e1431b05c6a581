"""Varying captions from caches: exact on resume, shown before training, rebuilt only when changed."""

from __future__ import annotations

import pytest

from tests.recipes.recipe import Bench, draw_images, exported, losses, record

VARIED = {
    "captions__shuffle": "true",
    "captions__tag_dropout": 0.25,
    "captions__dropout": 0.2,
    "captions__dropout_every_n_epochs": 3,
    "captions__trigger_word": "zobo",
    "captions__variants": 4,
    "captions__prompt_weighting": "true",
    "checkpoint__every_n_steps": 3,
}


@pytest.fixture
def own(bench: Bench, tmp_path) -> Bench:
    """Images with tags that the test can change, and empty caches."""
    data = draw_images(tmp_path / "own", count=6)
    for index, path in enumerate(sorted(data.glob("*.txt"))):
        path.write_text(f"a (ring:1.3), a field, {'one, two' if index else 'zobo, three'}", encoding="utf-8")
    return Bench(bench.model, data, bench.output, tmp_path / "caches")


def texts_of(bench: Bench, capsys, **settings: object) -> str:
    """The text cache line of a dry run."""
    assert bench.run("asked", "--dry-run", command="cache", **(VARIED | settings)) == 0
    return next(line.strip() for line in capsys.readouterr().out.splitlines() if "text embedding cache: " in line)


def test_six_steps_equal_three_and_three_with_varying_captions(own, capsys):
    assert own.run("whole", **VARIED) == 0
    shown = capsys.readouterr().out
    assert "captions, for example, empty 20% of the time:" in shown
    assert "  image_0.png: canonical 'a ring, a field, zobo, three', trained on 4 texts:" in shown
    assert "note: 5 of 6 captions lack the trigger 'zobo'" in shown
    assert "up to 4 texts for each of 2 captions: " in shown
    assert own.run("halves", steps=3, **VARIED) == 0
    assert own.run("halves", "--resume", **VARIED) == 0
    assert losses(own.folder("halves")) == losses(own.folder("whole"))
    assert exported(own.folder("halves")) == exported(own.folder("whole"))
    whole = record(own.folder("whole"))["sample_counts"]
    assert whole == record(own.folder("halves"))["sample_counts"]
    assert whole["captions"]["dropped"] > 0
    table = (own.folder("whole") / "sample_counts.csv").read_text(encoding="utf-8")
    assert all("zobo" in line for line in table.splitlines() if line.startswith("caption,") and "ring" in line)
    capsys.readouterr()

    first = texts_of(own, capsys)
    assert first.endswith("all cached")
    later = {"captions__dropout": 0.5, "captions__dropout_every_n_epochs": 0, "train__seed": 7}
    assert texts_of(own, capsys, **later) == first
    (own.data / "image_0.txt").write_text("a ring, zobo alone, there", encoding="utf-8")
    changed = texts_of(own, capsys)
    built = int(changed.partition(" encoding ")[2].split()[0])
    assert 1 <= built <= 5  # its variants, and its canonical text as a validation image
    assert texts_of(own, capsys, captions__shuffle="false", captions__tag_dropout=0, captions__variants=1) != changed
    assert own.run("halves", "--resume", steps=7, **(VARIED | {"captions__variants": 5, "captions__dropout": 0.5})) == 2
    output = capsys.readouterr().err
    assert "captions.variants was 4 and is now 5" in output
    assert "captions.dropout was 0.2 and is now 0.5" in output
