"""Which program reads which LoRA file whole, by the form of its names and the family: looked at with their own code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lora_trainer.export.inspection import Inspected

Reads = Literal["whole", "in part", "not", "unknown"]
UNETS = ("sd15", "sd2", "sdxl")
KOHYA_IN_DIFFUSERS = (*UNETS, "flux", "z_image")  # 0.42 translates no names of other families
IN_SD_SCRIPTS = (*UNETS, "sd3", "flux")
PEFT_IN_COMFYUI = ("sd3",)
NOT_LOOKED_AT_IN_COMFYUI = ("z_image",)  # diffusers' names, which only its later versions know


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
    name, family, plain = "diffusers", file.weights.family, set(file.scales) <= {1.0}
    if file.words:
        return Client(
            name, "not", "it refuses files with learned words inside; convert --to diffusers writes them apart"
        )
    if file.style in ("kohya", "kohya, first code"):
        if family not in KOHYA_IN_DIFFUSERS:
            return Client(name, "not", "it knows these names for other families only; convert --to diffusers")
        if family in UNETS and len(file.scales) > 1:
            return Client(name, "in part", "it misnames alphas that differ between modules; convert --to diffusers")
        return Client(name, "whole")
    if file.style == "diffusers":
        if file.alpha_keys and family in UNETS:
            return Client(name, "not", "it refuses alpha keys in its own form; convert --to diffusers")
        if file.alpha_keys and not plain and family not in KOHYA_IN_DIFFUSERS:
            return Client(name, "in part", "it passes over alpha here, which sets the strength; convert --to diffusers")
        return Client(name, "whole")
    if file.style == "old diffusers":
        return Client(name, "whole" if family in UNETS else "unknown")
    return Client(name, "not", f"it does not know {_named(file)}; convert --to diffusers")


def _comfyui(file: Inspected) -> Client:
    name, family = "ComfyUI", file.weights.family
    words = "it passes over the learned words" if file.words else ""
    if file.style in ("kohya", "kohya, first code", "original"):
        return Client(name, "in part" if words else "whole", words)
    if file.style == "old diffusers":
        return Client(name, "whole" if family in UNETS else "unknown")
    if file.style == "peft" and family not in PEFT_IN_COMFYUI:
        return Client(name, "not", "it does not know peft's names for this family; convert --to kohya")
    if file.style == "diffusers" and family in UNETS:
        return Client(name, "in part", "it loads a part of these names with a line in its log; convert --to kohya")
    if not file.alpha_keys and not set(file.scales) <= {1.0}:
        return Client(
            name, "in part", "it never reads alpha from the header, so its strength differs; convert --to kohya"
        )
    return Client(name, "unknown" if family in (None, *NOT_LOOKED_AT_IN_COMFYUI) else "whole")


def _webui(file: Inspected) -> Client:
    name = "A1111, Forge"
    if file.style not in ("kohya", "kohya, first code"):
        return Client(name, "unknown", "not looked at; kohya's form is what they are known to load")
    if file.weights.family in UNETS:
        return Client(name, "whole", "not looked at: they are known to load these names")
    return Client(name, "unknown", "not looked at; Forge is known to load these names, A1111 not")


def _sd_scripts(file: Inspected) -> Client:
    name = "sd-scripts"
    if file.style not in ("kohya", "kohya, first code"):
        return Client(name, "not", "it reads kohya's form only; convert --to kohya")
    if file.weights.family not in IN_SD_SCRIPTS:
        return Client(name, "unknown")
    return Client(name, "in part" if file.words else "whole", "it passes over the learned words" if file.words else "")


def _named(file: Inspected) -> str:
    return {"peft": "peft's names", "original": "the original's names in this form"}.get(
        file.style, "names without a prefix"
    )
