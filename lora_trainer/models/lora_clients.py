"""Which program reads which LoRA file whole, by the style of its names and the family: tested with their own code."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from lora_trainer.lora_format.diffusers import renamed_magnitudes
from lora_trainer.lora_format.keys import NUMBERED, T5, of_language_model
from lora_trainer.lora_format.kinds import KINDS, LORA, NETWORKS, REWRITTEN
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import knows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lora_trainer.lora_format.inspection import Inspected
    from lora_trainer.lora_format.layer_updates import Kind, Network
    from lora_trainer.lora_format.weights import AdapterWeights
    from lora_trainer.models.family import Family

Reads = Literal["whole", "in part", "not", "unknown"]
PROGRAMS = ("diffusers", "ComfyUI", "A1111, Forge", "sd-scripts")
KOHYA = ("kohya", "kohya, first code")
GENERIC = ("original", "original, kohya's halves")  # ComfyUI's own names
PASSES_OVER_TOKENS = "it passes over the learned tokens"


@dataclass(frozen=True)
class Client:
    """How much of a file a program reads, and why where that is not all."""

    name: str
    reads: Reads
    why: str = ""


def clients(file: Inspected) -> list[Client]:
    """diffusers, ComfyUI, A1111 with Forge, and sd-scripts; unknown for a damaged file."""
    if file.errors:
        return [Client(name, "unknown", "the file has errors") for name in PROGRAMS]
    family = _family(file)
    algorithms = {update.algorithm for update in file.weights.modules.values()}
    if kinds := [kind for name, kind in KINDS.items() if name != LORA and kind.algorithm in algorithms]:
        others = [Client(name, "unknown", "not looked at for other kinds than LoRA") for name in PROGRAMS[2:]]
        if (network := _network(file)) is not None:
            own = Client(network.program, "whole", f"with {network.module}, which writes these names")
            others = [own if client.name == own.name else client for client in others]
        return [_diffusers_of(file, family, kinds), _comfyui_of(file, family, kinds), *others]
    return [_diffusers(file, family), _comfyui(file, family), _webui(file), _sd_scripts(file, family)]


def _network(file: Inspected) -> Network | None:
    """The program's own network whose names the file has."""
    return next((network for network in NETWORKS if network.style == file.style), None)


def _diffusers_of(file: Inspected, family: Family | None, kinds: Sequence[Kind]) -> Client:
    """diffusers of other kinds than LoRA; in other names than its own it drops magnitudes with a warning."""
    name = PROGRAMS[0]
    if REWRITTEN.keys() & file.weights.metadata.keys():
        return Client(name, "not", "its magnitudes are for ComfyUI")
    if file.style == "diffusers" and not file.alpha_keys:
        if renamed := renamed_magnitudes(file.keys):
            layers = f"it misnames the magnitudes of {len(renamed)} layers"
            return Client(name, "not", f"{layers}, whose first forward pass raises; convert --to lora --model BASE")
        readers = family.lora_files.readers if family else ()
        facts = kinds[0].facts
        if len(kinds) == 1 and facts is not None and facts.is_loaded_by_diffusers(readers):
            return Client(name, "whole")
    return Client(name, "not", f"it does not know {file.kind} in these names for this family")


def _comfyui_of(file: Inspected, family: Family | None, kinds: Sequence[Kind]) -> Client:
    name = PROGRAMS[1]
    beside = [kind.title for kind in kinds if kind.decompose is not None]
    if file.style == "diffusers" and beside:
        return Client(name, "in part", f"it does not read a {beside[0]}'s magnitudes by these names")
    if (network := _network(file)) is not None:
        return Client(name, "not", f"it knows no names that begin with {network.prefix}_; convert --to lora")
    if family is None or f"{name}: {file.style}" not in family.lora_files.readers:
        return Client(name, "unknown")
    own = [kind.title for kind in kinds if kind.rewritten.keys() & file.weights.metadata.keys()]
    if own:
        why = f"and this program; the magnitudes are for ComfyUI's {own[0]} of 0.3.64 and newer"
        return Client(name, "whole", why)
    reads, why = max((kind.comfyui for kind in kinds), key=lambda each: (each[0] != "whole", each[1] != ""))
    return Client(name, reads, why)


def _diffusers(file: Inspected, family: Family | None) -> Client:
    found, skipped = _diffusers_of_the_rest(file, family), _texts_passed_over(file)
    if not skipped or found.reads == "unknown":
        return found
    passes = f"it passes over {skipped}, without a word"
    if found.reads == "not":
        return replace(found, why=f"{found.why}, though there {passes}")
    return Client(found.name, "in part", passes)


def _texts_passed_over(file: Inspected) -> str:
    """The text encoders whose layers diffusers skips, for people; empty where there are none."""
    t5 = sum(T5 in module for module in file.weights.modules)
    named = {"T5": t5, "the language model": sum(map(of_language_model, file.weights.modules))}
    return " and ".join(f"{name}, {count} modules" for name, count in named.items() if count)


def _diffusers_of_the_rest(file: Inspected, family: Family | None) -> Client:
    name = "diffusers"
    if file.learned_tokens:
        return Client(
            name, "not", "it refuses files with learned tokens inside; convert --to diffusers writes them apart"
        )
    if file.style == "diffusers":
        return _diffusers_own(file, family)
    if family is None:
        return Client(name, "unknown")
    if f"{name}: {file.style}" not in family.lora_files.readers:
        what = f"it does not know {_named(file)}" if file.style not in KOHYA else "it knows these names for others only"
        return Client(name, "not", f"{what}; convert --to diffusers")
    if file.style in KOHYA and _has_unet(file) and several_alphas(file.weights):
        return Client(name, "in part", "it misnames alphas that differ between modules; convert --to diffusers")
    return _of_the_rest(file, family, name)


def _diffusers_own(file: Inspected, family: Family | None) -> Client:
    """Its own form, in which it refuses alpha keys but for one family's, and looks at the first key to tell its old form."""
    name = "diffusers"
    of_clip = re.compile(r"text_encoder\w*\.(?:text_model|text_projection)")
    is_clip = all(of_clip.match(module) for module in file.weights.modules)  # which every pipeline with it reads
    if not (is_clip if family is None else knows(family, file.weights.modules)):
        return Client(name, "unknown")
    if file.alpha_keys:
        if family is None:
            return Client(name, "unknown")
        if "diffusers: diffusers, alpha keys" not in family.lora_files.readers:
            return Client(name, "not", "it refuses alpha keys in its own form; convert --to diffusers")
    if old := _passed_over_beside_peft(file):
        return Client(name, "in part", f"it skips {old} layers by its old names; convert --to diffusers")
    return Client(name, "whole")


def _passed_over_beside_peft(file: Inspected) -> int:
    """How many layers by the names before peft diffusers skips, because the first key of their component is one of peft's."""
    first: dict[str, str] = {}
    for key in file.keys:
        first.setdefault(key.partition(".")[0], key)
    by_peft = {component for component, key in first.items() if ".lora_A." in key}
    old = [key for key in file.keys if key.endswith(".lora.down.weight") and key.partition(".")[0] in by_peft]
    return len(old)


def _comfyui(file: Inspected, family: Family | None) -> Client:
    name = "ComfyUI"
    if family is None:
        # A text encoder's names are the same for all models.
        is_text = all(module.startswith("text_encoder") for module in file.weights.modules)
        is_known = is_text and file.style in (*KOHYA, *GENERIC) and not file.learned_tokens
        return Client(name, "whole" if is_known else "unknown")
    if file.style in ("diffusers", "no prefix") and _has_unet(file):
        return Client(name, "in part", "it loads a part of these names with a line in its log; convert --to kohya")
    if file.style == "XLabs":
        return Client(name, "unknown", "it knows these names where the file has all of the model's blocks")
    if f"{name}: {file.style}" not in family.lora_files.readers:
        return Client(name, "not", f"it does not know {_named(file)} for this family; convert --to kohya")
    if not file.alpha_keys and not set(file.scales) <= {1.0}:
        return Client(
            name, "in part", "it never reads alpha from the header, so its strength differs; convert --to kohya"
        )
    if file.style == "diffusers" and (skipped := _texts_passed_over(file)):
        return Client(name, "in part", f"it passes over {skipped}, by these names; convert --to kohya")
    return Client(
        name, "in part" if file.learned_tokens else "whole", PASSES_OVER_TOKENS if file.learned_tokens else ""
    )


def _webui(file: Inspected) -> Client:
    name = "A1111, Forge"
    if file.style not in KOHYA:
        return Client(name, "unknown", "not looked at; kohya's form is what they are known to load")
    if _has_unet(file):
        return Client(name, "whole", "not looked at: they are known to load these names")
    return Client(name, "unknown", "not looked at; Forge is known to load these names, A1111 not")


def _sd_scripts(file: Inspected, family: Family | None) -> Client:
    name = "sd-scripts"
    if family is None and file.style in KOHYA:
        return Client(name, "unknown")
    if family is None or f"{name}: {file.style}" not in family.lora_files.readers:
        if file.style == "kohya":
            return Client(name, "unknown")  # a family that it does not run
        return Client(name, "not", f"it does not know {_named(file)} for this family; convert --to kohya")
    if file.learned_tokens:
        return Client(name, "in part", PASSES_OVER_TOKENS)
    if file.numbered and family.lora_files.prefixes.get("text_encoder", NUMBERED) != NUMBERED:
        return Client(name, "in part", "it knows the one text encoder without a number; convert --to kohya")
    beside, component = family.lora_files.needs_beside.get(name, ()), family.denoiser.component
    names = [module.partition(".")[2] for module in file.weights.modules if module.startswith(f"{component}.")]
    if file.style == "kohya" and names and beside and not any(each.startswith(beside) for each in names):
        reads: Reads = "not" if len(names) == len(file.weights.modules) else "in part"
        return Client(name, reads, f"it skips {len(names)} modules where none is of {' or '.join(beside)}")
    return _of_the_rest(file, family, name)


def _of_the_rest(file: Inspected, family: Family, name: str) -> Client:
    """Whole, but for modules that the program skips without a message."""
    left_out = () if "diffusers' names" in file.style else family.lora_files.passed_over.get(name, ())
    names = [module.partition(".")[2] for module in file.weights.modules]
    if count := sum(any(fnmatchcase(each, f"{beginning}*") for beginning in left_out) for each in names):
        return Client(name, "in part", f"it skips {count} of {len(names)} modules")
    return Client(name, "whole")


def _has_unet(file: Inspected) -> bool:
    """Also of a file that fits several families with a U-Net: their names are the same."""
    if family := file.weights.family:
        return FAMILIES[family].denoiser.component == "unet"
    return any(module.startswith("unet.") for module in file.weights.modules)


def _family(file: Inspected) -> Family | None:
    """The file's family, or any with a U-Net where that is all that is known."""
    if family := file.weights.family:
        return FAMILIES[family]
    return (
        next((each for each in FAMILIES.values() if each.denoiser.component == "unet"), None)
        if _has_unet(file)
        else None
    )


def several_alphas(weights: AdapterWeights) -> bool:
    """Whether alpha differs within a component: in kohya's form diffusers 0.42 takes a U-Net's commonest for all."""
    alphas = {(module.partition(".")[0], pair.alpha) for module, pair in weights.modules.items()}
    return len(alphas) > len({component for component, _ in alphas})


def _named(file: Inspected) -> str:
    return {"no prefix": "names without a prefix"}.get(file.style, f"this form ({file.style})")
