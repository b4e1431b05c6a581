"""Which program reads which LoRA file whole, by the form of its names and the family: looked at with their own code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from lora_trainer.models import FAMILIES
from lora_trainer.models.family import Reader

if TYPE_CHECKING:
    from lora_trainer.export.inspection import Inspected
    from lora_trainer.export.weights import LoraWeights

Reads = Literal["whole", "in part", "not", "unknown"]
KOHYA = ("kohya", "kohya, first code")
T5 = ".encoder.block."  # in the names of its modules


@dataclass(frozen=True)
class Client:
    """What a program makes of a file, and why where that is less than the whole."""

    name: str
    reads: Reads
    why: str = ""


def clients(file: Inspected) -> list[Client]:
    """diffusers, ComfyUI, A1111 with Forge, and sd-scripts."""
    return [_diffusers(file), _comfyui(file), _webui(file), _sd_scripts(file)]


def _diffusers(file: Inspected) -> Client:
    found = _diffusers_without_t5(file)
    t5 = sum(T5 in module for module in file.weights.modules)
    if not t5:
        return found
    if found.reads == "not":  # convert refuses such a file, too
        return replace(found, why=f"{found.why.partition(';')[0]}, and no LoRA on T5 in any form")
    return Client(found.name, "in part", f"it passes over T5, {t5} modules, without a word")


def _diffusers_without_t5(file: Inspected) -> Client:
    name, readers = "diffusers", _readers(file)
    if file.words:
        return Client(
            name, "not", "it refuses files with learned words inside; convert --to diffusers writes them apart"
        )
    if file.style in KOHYA:
        if readers is None:
            return Client(name, "unknown")
        if "diffusers: kohya" not in readers:
            return Client(name, "not", "it knows these names for other families only; convert --to diffusers")
        if _has_unet(file) and several_alphas(file.weights):
            return Client(name, "in part", "it misnames alphas that differ between modules; convert --to diffusers")
        return Client(name, "whole")
    if file.style == "diffusers":
        if not file.alpha_keys:
            return Client(name, "whole")
        if readers is None:
            return Client(name, "unknown")
        if _has_unet(file) or "diffusers: kohya" not in readers:
            return Client(name, "not", "it refuses alpha keys in its own form; convert --to diffusers")
        return Client(name, "whole")
    if file.style == "old diffusers":
        return Client(name, "whole" if _has_unet(file) else "unknown")
    return Client(name, "not", f"it does not know {_named(file)}; convert --to diffusers")


def _comfyui(file: Inspected) -> Client:
    name, readers = "ComfyUI", _readers(file)
    words = "it passes over the learned words" if file.words else ""
    if file.style in (*KOHYA, "original"):
        return Client(name, "in part" if words else "whole", words)
    if file.style == "old diffusers":
        return Client(name, "whole" if _has_unet(file) else "unknown")
    if file.style == "peft" and (readers is None or "ComfyUI: peft" not in readers):
        return Client(name, "not", "it does not know peft's names for this family; convert --to kohya")
    if file.style == "diffusers" and _has_unet(file):
        return Client(name, "in part", "it loads a part of these names with a line in its log; convert --to kohya")
    if not file.alpha_keys and not set(file.scales) <= {1.0}:
        return Client(
            name, "in part", "it never reads alpha from the header, so its strength differs; convert --to kohya"
        )
    return Client(name, "whole" if readers and "ComfyUI: diffusers" in readers else "unknown")


def _webui(file: Inspected) -> Client:
    name = "A1111, Forge"
    if file.style not in KOHYA:
        return Client(name, "unknown", "not looked at; kohya's form is what they are known to load")
    if _has_unet(file):
        return Client(name, "whole", "not looked at: they are known to load these names")
    return Client(name, "unknown", "not looked at; Forge is known to load these names, A1111 not")


def _sd_scripts(file: Inspected) -> Client:
    name, readers = "sd-scripts", _readers(file)
    if file.style not in KOHYA:
        return Client(name, "not", "it reads kohya's form only; convert --to kohya")
    if not readers or "sd-scripts: kohya" not in readers:
        return Client(name, "unknown")
    return Client(name, "in part" if file.words else "whole", "it passes over the learned words" if file.words else "")


def _has_unet(file: Inspected) -> bool:
    """Also of a file that fits several families with a U-Net: their names are the same."""
    if family := file.weights.family:
        return FAMILIES[family].denoiser_prefix == "unet"
    return any(module.startswith("unet.") for module in file.weights.modules)


def _readers(file: Inspected) -> tuple[Reader, ...] | None:
    """None where the family is not known."""
    if family := file.weights.family:
        return FAMILIES[family].lora_readers
    unets = (each.lora_readers for each in FAMILIES.values() if each.denoiser_prefix == "unet")
    return next(unets, None) if _has_unet(file) else None


def several_alphas(weights: LoraWeights) -> bool:
    """Whether alpha differs within a component: in kohya's form diffusers 0.42 takes a U-Net's commonest for all."""
    alphas = {(module.partition(".")[0], pair.alpha) for module, pair in weights.modules.items()}
    return len(alphas) > len({component for component, _ in alphas})


def _named(file: Inspected) -> str:
    return {"peft": "peft's names", "original": "the original's names in this form"}.get(
        file.style, "names without a prefix"
    )
