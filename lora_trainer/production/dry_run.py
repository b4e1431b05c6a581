"""`--dry-run`: what a run would do, without training; nothing is written but what is remembered of files in the user's cache folder."""

from __future__ import annotations

from lora_trainer.config.layers import DEFAULT, flattened
from lora_trainer.config.toml import shown
from lora_trainer.production.caching import cache_folder, plan_caches
from lora_trainer.production.choices import card_gib, choose
from lora_trainer.production.inputs import Inputs, arithmetic, own_architecture
from lora_trainer.production.messages import show_captions, show_views
from lora_trainer.production.order import Order
from lora_trainer.production.plan import make_plan
from lora_trainer.production.plan_view import show_plan as show_memory
from lora_trainer.training.processes import join_processes


def show_plan(order: Order, inputs: Inputs) -> None:
    """Samples, buckets, the arithmetic of the steps, three captions, the caches, the plan for memory, and every setting's origin."""
    resolved, config, console = order.resolved, order.config, order.console
    processes = join_processes()
    choices = choose(resolved, inputs.family, own_architecture(inputs), processes.device, processes.world)
    steps = arithmetic(config, inputs.train, choices.micro, processes.world)
    held_out = f", {len(inputs.held_out)} held out for validation" if inputs.held_out else ", none held out"
    console.print(f"model: {inputs.facts.path} ({inputs.family.name}, {inputs.resolution} px)")
    console.print(f"samples: {len(inputs.train)} trained{held_out}")
    show_views(config, inputs, steps, console)
    console.print(f"steps: {steps.line}")
    show_captions(config, inputs, console, choices.encoder_dtype.itemsize)
    console.print(f"caches in {cache_folder(config)}:")
    for line in plan_caches(config, inputs, choices).lines:
        console.print(f"  {line.replace('rebuilt', 'to build')}")
    for line in choices.lines:
        console.print(line)
    console.print("memory, on a card:")
    show_memory(make_plan(resolved, order.families, card_gib(config), inputs.train), console)
    console.print(f"would write to {order.folder}")
    console.print("settings that a preset, file or flag set:")
    for name, value in flattened(config).items():
        if resolved.origin[name] != DEFAULT:
            console.print(f"  {name} = {shown(value)}  ({resolved.origin[name]})")
