"""A few-step student of the built-in base: plain training undoes what distillation gave it, training on the base does not."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from diffusers import DDIMScheduler

import distilled_study
from builtin_base.distill import distances, draw_trajectories, jumps, load, train_student
from lora_trainer.builtin import BASE_FOLDER

TRAJECTORIES, STUDENT_STEPS, LORA_STEPS = 144, 60, 80


def test_plain_training_undoes_the_few_steps_and_training_on_the_base_does_not(tmp_path: Path) -> None:
    """By how far four unguided steps end from the teacher's eight guided ones. The images are of shapes that the base
    knows, so that nothing changes but the distillation."""
    student = load(BASE_FOLDER)
    train_student(student, draw_trajectories(student, TRAJECTORIES, 0), STUDENT_STEPS, 0, 24, 4e-4)
    held = draw_trajectories(load(BASE_FOLDER), 24, 777)
    before, distilled = mean(distances(load(BASE_FOLDER), held)), mean(distances(student, held))
    gained = before - distilled
    assert gained > 0.15 * before
    student.scheduler = DDIMScheduler.from_config(student.scheduler.config, timestep_spacing="trailing")
    student.save_pretrained(tmp_path / "student")
    data = distilled_study.draw_scenes(tmp_path / "known", 24)
    kept = {}
    for name, model in (("plain", tmp_path / "student"), ("base", BASE_FOLDER)):
        lora = distilled_study.train(tmp_path, name, model, data, LORA_STEPS, 1, {})
        pipeline = load(tmp_path / "student")
        pipeline.load_lora_weights(str(lora))
        kept[name] = (before - mean(distances(pipeline, held))) / gained
    print(before, distilled, kept)
    assert kept["plain"] < 0.25
    assert kept["base"] > 0.4


def test_a_step_of_the_student_is_two_of_the_teacher() -> None:
    """With the same noise in both, the teacher's two steps of DDIM end where the student's one does (arXiv:2202.00512)."""
    scheduler = load(BASE_FOLDER).scheduler
    for number, step in enumerate(jumps(scheduler, 4)):
        first, second = jumps(scheduler, 8)[2 * number : 2 * number + 2]
        assert step.t == first.t
        assert abs(step.keep - first.keep * second.keep) < 1e-9
        assert abs(step.add - (second.keep * first.add + second.add)) < 1e-9
