"""Compare the trainer with the usual script's loop, tuned: the steps and seconds to the same validation loss.

    python scripts/compare_usual.py OUT
    python scripts/compare_usual.py OUT --table

The usual loop is that of diffusers' text-to-image LoRA script, written with public functions only: accelerate, peft,
AdamW, noise and timesteps from torch's generator, clipping at norm 1. It trains on the same encoded images and
captions in the same buckets, at the same rank and batch size, without crops and flips, with attention's modules alone
as in that script or with ours. Its learning rate and LR scheduler are those that end lowest in short runs with a seed
that the comparison does not use. Both are validated on the same images at the same noise.

Each finished run is a line of OUT/runs.jsonl and is not trained again; a run that is stopped is. One thread, so
that seconds are those of one core, by its CPU time: they hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler
from diffusers.optimization import get_scheduler
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from lora_trainer.builtin import BASE_FOLDER
from lora_trainer.config.layers import Layer
from lora_trainer.config.presets import preset_layers
from lora_trainer.evaluation.compute import Compute
from lora_trainer.evaluation.validation_loss import ValidationLoss, validation_losses
from lora_trainer.models.families.sd15 import FAMILY
from lora_trainer.monitor.trackers import VALIDATION, Trackers, read_lines
from lora_trainer.run.inputs import read_inputs
from lora_trainer.run.order import Order, plain_console, run_folder
from lora_trainer.run.prepare import VALIDATION_TIMESTEPS, prepare
from lora_trainer.run.session import open_session
from lora_trainer.run.settings import settle
from lora_trainer.run.start import fixed_settings
from lora_trainer.run_folder.progress import unwatched
from lora_trainer.training.loop import train
from lora_trainer.training.torch_settings import set_hardware

if TYPE_CHECKING:
    from lora_trainer.training.training_run import Run

CPU = torch.device("cpu")
SEEDS = (42, 7, 1234)
TUNING_SEED = 1
STEPS, TUNING_STEPS = 880, 300  # of the compared runs unless set, and of those that tune
EVERY = 55  # steps from one validation to the next
BATCH = 2
ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")  # what diffusers' script trains
OURS, HALF, USUAL, USUAL_ATTENTION = "ours", "ours, half the steps", "usual, our modules", "usual, attention"
RATES = (5e-4, 1.5e-3, 3e-3)
FINER, COARSER = 2.5, 2.0  # how far beyond an end that is best the next learning rate is
T_95 = {2: 12.71, 3: 4.30}  # Student's t by the number of seeds
RUNS = "runs.jsonl"
TITLES = (
    "row",
    "steps",
    "base",
    "final loss",
    "over ours",
    "lowest",
    "CPU ms a step",
    "reaches our final loss after",
    "we reach its final loss after",
)


@dataclass(frozen=True)
class Arm:
    """One run. For ours `learning_rate` and `scheduler` are those of its preset, and None."""

    name: str
    seed: int
    steps: int
    learning_rate: float | None = None
    scheduler: str | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        return self.name, self.seed, self.steps, self.learning_rate, self.scheduler


@dataclass
class Clock:
    """CPU seconds of this process without those of validations."""

    validating: float = 0.0
    began: float = field(default_factory=time.process_time)

    def timed(self, validate: Callable[[], float]) -> float:
        before = time.process_time()
        loss = validate()
        self.validating += time.process_time() - before
        return loss

    @property
    def seconds(self) -> float:
        return time.process_time() - self.began - self.validating


def prepared(arm: Arm, folder: Path) -> Run:
    """A run of the trainer with the built-in preset: its data, validation images and base are everyone's."""
    values: dict[str, Any] = {
        "train": {"seed": arm.seed, "max_steps": arm.steps, "effective_batch_size": BATCH},
        "validation": {"every_n_steps": EVERY, "split": 0.25, "split_seed": arm.seed, "agreement": False},
        "sample": {"every_n_steps": 0},
        "hardware": {"threads": 1},
        "cache": {"dir": str(folder / "cache")},
        "run": {"output": str(folder / "runs"), "name": f"{arm.name}-{arm.seed}-{arm.steps}-{time.time_ns()}"},
    }
    resolved = settle(preset_layers(["12gb"]).layers, [Layer("comparison", values)])
    set_hardware(resolved.config, CPU)
    order = Order(resolved, run_folder(resolved.config), plain_console(quiet=True))
    inputs = read_inputs(order.config)
    session = open_session(order, inputs)
    order.folder.mkdir(parents=True)
    return prepare(session, fixed_settings(order.config, inputs, session.choices))[1]


def train_ours(arm: Arm, folder: Path) -> dict[str, Any]:
    """The trainer's own loop, with its checkpoints and metrics, and without images and gates."""
    run = prepared(arm, folder)
    assert run.validate is not None
    validate, clock, losses = run.validate, Clock(), list[ValidationLoss]()

    def timed(batch_size: int) -> ValidationLoss:
        def measure() -> float:
            losses.append(validate(batch_size))
            return losses[-1].plain

        clock.timed(measure)
        return losses[-1]

    trackers = Trackers(run.folder, resume_step=-1)
    try:
        train(replace(run, validate=timed), None, trackers, nullcontext(unwatched))
    finally:
        trackers.close()
    seconds = clock.seconds
    curve = {int(row["step"]): float(row["loss"]) for row in read_lines(run.folder / VALIDATION)}
    shutil.rmtree(run.folder)
    return {"curve": curve, "seconds": seconds, "modules": len(adapted_modules(run.context.denoiser))}


def encoded_items(run: Run) -> list[dict[str, Tensor]]:
    """The trained images as the caches have them: mean and spread of scaled latents [C, h, w], embeddings of the caption."""
    data = run.feed.data
    return [
        {
            **data.latents.read(data.latent_keys[index][0], ""),
            "embeds": data.texts.read(data.text_keys[index][0], "")["embeds"],
        }
        for index in range(len(data.samples))
    ]


def train_usual(arm: Arm, folder: Path) -> dict[str, Any]:
    """The loop of diffusers' script. Images of a batch that differ in size go through the denoiser one by one."""
    assert arm.learning_rate is not None
    assert arm.scheduler is not None
    run = prepared(arm, folder)
    targets = list(ATTENTION) if arm.name == USUAL_ATTENTION else adapted_modules(run.context.denoiser)
    rank = run.config.lora.rank
    items, unseen = encoded_items(run), run.images.unseen
    torch.manual_seed(arm.seed)
    unet: Any = FAMILY.denoiser.load(BASE_FOLDER, torch.float32, CPU)
    unet.requires_grad_(False)
    unet.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=targets),
    )
    parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    noise_scheduler = DDPMScheduler.from_pretrained(BASE_FOLDER, subfolder="scheduler", local_files_only=True)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(parameters, lr=arm.learning_rate, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    loader: Any = DataLoader(items, batch_size=BATCH, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    lr_scheduler = get_scheduler(arm.scheduler, optimizer, num_warmup_steps=0, num_training_steps=arm.steps)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(unet, optimizer, loader, lr_scheduler)

    def validation_loss() -> float:
        model.eval()

        def predict(noisy: Tensor, t: Tensor, cond: Any, sizes: Tensor) -> Tensor:
            predicted: Tensor = unet(noisy, t, cond["embeds"], return_dict=False)[0]
            return predicted

        losses = validation_losses(
            predict,
            unseen,
            run.context.process,
            seed=run.config.train.seed,
            timesteps=VALIDATION_TIMESTEPS,
            compute=Compute(torch.float32, CPU),
        )
        model.train()
        return float(losses.mean())

    clock = Clock()
    curve = {0: clock.timed(validation_loss)}
    for step, batch in enumerate(epochs(loader, arm.steps), start=1):
        with accelerator.accumulate(model):
            loss = batch_loss(model, noise_scheduler, batch)
            accelerator.gather(loss.detach().repeat(BATCH)).mean().item()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if step % EVERY == 0 or step == arm.steps:
            curve[step] = clock.timed(validation_loss)
    return {"curve": curve, "seconds": clock.seconds, "modules": len(adapted_modules(unet))}


def adapted_modules(unet: nn.Module) -> list[str]:
    return [name for name, module in unet.named_modules() if isinstance(module, BaseTunerLayer)]


def epochs(loader: Any, steps: int) -> Iterator[list[dict[str, Tensor]]]:
    """Batches of as many epochs as so many steps need."""
    left = steps
    while left > 0:
        for batch in loader:
            if left > 0:
                yield batch
            left -= 1


def batch_loss(model: nn.Module, noise_scheduler: Any, batch: list[dict[str, Tensor]]) -> Tensor:
    """The mean squared error of a batch, images of one size together."""
    by_size: dict[tuple[int, ...], list[dict[str, Tensor]]] = {}
    for item in batch:
        by_size.setdefault(tuple(item["mean"].shape), []).append(item)
    total = torch.zeros(())
    for group in by_size.values():
        mean, spread = (torch.stack([item[name].float() for item in group]) for name in ("mean", "spread"))
        embeds = torch.stack([item["embeds"].float() for item in group])
        latents = mean + spread * torch.randn_like(mean)
        noise = torch.randn_like(latents)
        t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(group),))
        noisy = noise_scheduler.add_noise(latents, noise, t)
        predicted = model(noisy, t, embeds, return_dict=False)[0]
        total = total + mse_loss(predicted, noise) * len(group)
    return total / len(batch)


def finished(out: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The finished runs by their arm's key."""
    file = out / RUNS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    return {Arm(**row["arm"]).key: row for row in rows}


def result_of(arm: Arm, out: Path) -> dict[str, Any]:
    """The arm's curve {step: loss} and CPU seconds, from the file where it is finished."""
    if (row := finished(out).get(arm.key)) is None:
        found = (train_ours if arm.name == OURS else train_usual)(arm, out)
        row = {"arm": vars(arm), "commit": commit(), **found}
        with (out / RUNS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        last = max(found["curve"])
        print(f"{arm}: {found['curve'][last]:.5f} after {last} steps, {found['seconds']:.0f} s", flush=True)
    return row | {"curve": {int(step): loss for step, loss in row["curve"].items()}}


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()


def tuned(name: str, out: Path) -> list[Arm]:
    """The short runs: learning rates held constant, then cosine from the best of them up, which averages half of it.

    More learning rates are tried until none at an open end is best.
    """

    def end(rate: float, scheduler: str) -> float:
        return float(result_of(Arm(name, TUNING_SEED, TUNING_STEPS, rate, scheduler), out)["curve"][TUNING_STEPS])

    constant = {rate: end(rate, "constant") for rate in RATES}
    while (best := min(constant, key=constant.__getitem__)) in (min(constant), max(constant)):
        rate = best / FINER if best == min(constant) else best * COARSER
        constant[rate] = end(rate, "constant")
    rate, cosine = best, {best: end(best, "cosine")}
    while min(cosine, key=cosine.__getitem__) == rate:
        rate = min((each for each in constant if each > rate), default=rate * COARSER)
        cosine[rate] = end(rate, "cosine")
    tried = [(rate, "constant") for rate in sorted(constant)] + [(rate, "cosine") for rate in sorted(cosine)]
    return [Arm(name, TUNING_SEED, TUNING_STEPS, *each) for each in tried]


def chosen(name: str, out: Path) -> tuple[float, str]:
    """Learning rate and scheduler that end lowest in the short runs."""
    ends = {arm: result_of(arm, out)["curve"][TUNING_STEPS] for arm in tuned(name, out)}
    best = min(ends, key=lambda arm: ends[arm])
    assert best.learning_rate is not None
    assert best.scheduler is not None
    return best.learning_rate, best.scheduler


def compared(out: Path, steps: int) -> dict[str, list[Arm]]:
    """The arms of the comparison by their title, one for each seed; ours also in whole runs of half the steps."""
    found = {}
    for name in (USUAL, USUAL_ATTENTION):
        rate, scheduler = chosen(name, out)
        found[name] = [Arm(name, seed, steps, rate, scheduler) for seed in SEEDS]
    found[OURS] = [Arm(OURS, seed, steps) for seed in SEEDS]
    found[HALF] = [Arm(OURS, seed, steps // 2) for seed in SEEDS]
    return found


def steps_to(curve: dict[int, float], loss: float) -> float | None:
    """Steps until a curve first is at `loss`, on straight lines between its points; None where it never is."""
    points = sorted(curve.items())
    for (step, here), (later, there) in pairwise(points):
        if here <= loss:
            return float(step)
        if there <= loss:
            return step + (later - step) * (here - loss) / (here - there)
    return None


def interval(values: list[float], form: str) -> str:
    """Mean and half width of its 95 % interval over seeds (Student's t)."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return format(mean, form)
    half = T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}"


def table(out: Path, steps: int) -> str:
    """The short runs, and the comparison with its intervals over seeds, paired with ours by the seed."""
    lines = ["| usual loop, tuning | learning rate | LR scheduler | validation loss |", "|---|---|---|---|"]
    for name in (USUAL, USUAL_ATTENTION):
        lines += [
            f"| {name} | {arm.learning_rate:g} | {arm.scheduler} | {result_of(arm, out)['curve'][TUNING_STEPS]:.4f} |"
            for arm in tuned(name, out)
        ]
    kept = finished(out)
    arms = {title: each for title, each in compared(out, steps).items() if all(arm.key in kept for arm in each)}
    rows = {title: [result_of(arm, out) for arm in each] for title, each in arms.items()}
    ends = {title: [row["curve"][row["arm"]["steps"]] for row in each] for title, each in rows.items()}
    lines += ["", f"| {' | '.join(TITLES)} |", f"|{'---|' * len(TITLES)}"]
    for title, each in rows.items():
        pairs = list(zip(each, ends[title], rows.get(OURS, []), ends.get(OURS, []), strict=False))
        cells = [title, str(each[0]["arm"]["steps"])]
        cells += [interval([row["curve"][0] for row in each], ".3f"), interval(ends[title], ".4f")]
        cells.append(interval([end - own for _, end, _, own in pairs], "+.4f") if pairs and title != OURS else "")
        cells.append(interval([min(row["curve"].values()) for row in each], ".4f"))
        cells.append(interval([1000 * row["seconds"] / row["arm"]["steps"] for row in each], ".0f"))
        theirs = [(steps_to(row["curve"], own), row) for row, _, _, own in pairs]
        reached = [(steps_to(ours["curve"], end), ours) for _, end, ours, _ in pairs]
        cells += [counts(theirs), counts(reached)] if title != OURS else ["", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def counts(reached: list[tuple[float | None, dict[str, Any]]]) -> str:
    """Steps and CPU seconds of each seed; with an interval of the steps where all reached it."""
    each = []
    for step, row in reached:
        each.append("never" if step is None else f"{step:.0f} ({step * row['seconds'] / row['arm']['steps']:.0f} s)")
    known = [step for step, _ in reached if step is not None]
    mean = f"; {interval(known, '.0f')} steps" if known and len(known) == len(reached) else ""
    return ", ".join(each) + mean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of each compared run ({STEPS})")
    parser.add_argument("--table", action="store_true", help="print the table of the rows that are finished")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not args.table:
        arms = compared(out, args.steps)
        pairs = zip(arms[OURS], arms[USUAL], strict=True)  # what matters most is trained first
        for arm in [*(each for pair in pairs for each in pair), *arms[USUAL_ATTENTION], *arms[HALF]]:
            result_of(arm, out)
    print(table(out, args.steps))
    return 0


if __name__ == "__main__":
    sys.exit(main())
