"""`--dry-run`: what a run would do, without training.

Only the digests and sizes of files that were read are written, into the user's cache folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lora_trainer.config.layers import DEFAULT, flattened
from lora_trainer.config.toml import shown
from lora_trainer.core.errors import UsageError
from lora_trainer.run.bases.find import describe_model
from lora_trainer.run.caching import CachePlans, cache_folder, images_together, plan_caches, refuse_full_disk
from lora_trainer.run.choices import Choices, choose, gpu_gib, processes_on_their_gpus
from lora_trainer.run.differences import changes
from lora_trainer.run.generation import with_finished_class_images
from lora_trainer.run.inputs import Inputs, arithmetic, largest_of, own_architecture
from lora_trainer.run.messages import length_lines, model_lines, show_captions, show_views
from lora_trainer.run.plans.plan import Plan, make_plan
from lora_trainer.run.plans.view import show_plan as show_memory
from lora_trainer.run.room import Room, room_for
from lora_trainer.run.session import checked_start
from lora_trainer.run_folder.record import Record
from lora_trainer.training.checkpoints.checkpoint import list_checkpoints, step_of

if TYPE_CHECKING:
    from lora_trainer.data.steps import StepArithmetic
    from lora_trainer.run.order import Order


@dataclass(frozen=True)
class RunPlan:
    """What a run would do. Without the model's weights its caches are not known."""

    inputs: Inputs
    choices: Choices
    steps: StepArithmetic
    caches: CachePlans | None
    room: Room


def show_plan(order: Order, inputs: Inputs) -> RunPlan:
    """Print samples, buckets, steps, three captions, caches, memory, disk, and every setting's origin."""
    resolved, config, console = order.resolved, order.config, order.console
    processes = processes_on_their_gpus(config)
    largest = largest_of(config, inputs.train, inputs.train_plan, processes.world)
    choices = choose(resolved, inputs.family, own_architecture(inputs), processes.device, processes.world, largest)
    if inputs.facts.whole:  # else nothing can be there
        inputs = with_finished_class_images(config, inputs, choices.dtype, console)
    steps = arithmetic(config, inputs.train, choices.micro, processes.world)
    if config.model.path is not None:  # the built-in one was announced
        console.print(f"model: {describe_model(config.model)} ({inputs.family.name}, {inputs.resolution} px)")
    for line in model_lines(resolved, inputs):
        console.print(line)
    console.print(inputs.split_line)
    show_views(config, inputs, steps, console)
    console.print(f"steps: {steps.line}")
    for line in length_lines(resolved, steps):
        console.print(line)
    show_captions(config, inputs, console, choices.encoder_dtype.itemsize)
    console.print(f"caches in {cache_folder(config)}:")
    caches = None
    if inputs.facts.whole:
        caches = plan_caches(config, inputs, choices)
        for line in caches.lines:
            console.print(f"  {line}")
    else:  # the caches' keys depend on the weights
        console.print("  not known: the model's weights are not downloaded yet")
    data = (inputs.train, inputs.validation)
    plan = make_plan(resolved, order.families, gpu_gib(config), data, here=choices.device.type == "cuda")
    if choices.device.type == "cuda":  # the plan shows the micro-batch size too
        console.print("memory on a GPU:")
        show_memory(plan, console)
    else:
        for line in (*choices.lines, *on_a_gpu(plan)):
            console.print(line)
    console.print(f"would write to {order.folder}")
    room = room_of(order, plan, steps)
    console.print(room.line)
    show_settings(order)
    return RunPlan(inputs, choices, steps, caches, room)


def refuse_plan(order: Order, plan: RunPlan, *, trains: bool = True) -> None:
    """Raise UserError for what the run, or `cache` where it `trains` not, is refused for after its data is read."""
    if trains:
        checked_start(order, plan.inputs, plan.choices, plan.steps)
    if plan.caches is not None:
        refuse_full_disk(plan.inputs, plan.choices, plan.caches, only_looks=True)
        missing = bool(plan.caches.latents.missing)
        images_together(order.config, plan.inputs, plan.choices, missing=missing)
    if trains and plan.room.problem is not None:
        raise UsageError(plan.room.problem)


def show_settings(order: Order) -> None:
    """Every setting that is not a default with its origin; of a run that is resumed only what differs from it."""
    resolved, config, console = order.resolved, order.config, order.console
    earlier = Record.read(order.folder) if order.resume else None
    if earlier is not None:
        found = changes(earlier, config.model_dump(mode="json"))
        console.print(f"settings that differ from those of the run: {'' if found else 'none'}".rstrip())
        for name, change in found.items():
            console.print(f"  {name} {change}  ({resolved.origin[name]})", markup=False)
        return
    console.print("settings that a preset, file or flag set:")
    for name, value in flattened(config).items():
        if resolved.origin[name] != DEFAULT:
            text = shown(value)
            if name == "data.sources" and "{" in text:  # tables: one on a line
                text = f"\n  {' ' * len(name)}   ".join(map(shown, value))
            console.print(f"  {name} = {text}  ({resolved.origin[name]})")


def on_a_gpu(plan: Plan) -> tuple[str, ...]:
    """The plan's peak on the GPU that a preset is for, on a machine without one."""
    limit = plan.demand.limit_gib
    if limit is None:
        return ()
    fits = "" if plan.fits is not False else ", which does not fit"
    peak = f"{plan.fit.parts.peak:.2f} GiB of {limit:g}{fits}"
    return (f"memory on a GPU: peak {peak}; `lora-trainer plan` shows the parts",)


def room_of(order: Order, plan: Plan, steps: StepArithmetic) -> Room:
    """The disk space that the run's folder will need; a resumed run has part of it already."""
    newest = list_checkpoints(order.folder / "checkpoints")[:1] if order.resume else []
    done = step_of(newest[0]) if newest else 0
    return room_for(order.config, order.folder, plan.demand.shapes, done, steps.total, steps.steps_per_epoch)
