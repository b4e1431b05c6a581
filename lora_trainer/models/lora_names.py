"""LoRA files of every family, read by each family's names of modules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.lora_format.keys import HINTS, KOHYA_DOWN, NUMBERED, WITHOUT_DOTS
from lora_trainer.lora_format.layouts import Names, PublishedModel, rule_of, split_numbers
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import PREDICTIONS, Family
from lora_trainer.models.published import public_architecture, published_layers

if TYPE_CHECKING:
    import torch

    from lora_trainer.lora_format.convert import Converted, Form, SourceFile
    from lora_trainer.lora_format.inspection import Inspected
    from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights


def names_of(family: Family) -> Names:
    """The names of the family's modules in LoRA files."""
    return Names(
        family.name,
        family.denoiser.component,
        family.lora_files.prefixes,
        family.lora_files.layout,
        family.lora_files.also,
        family.lora_files.like,
        published_layers().get(family.name, ()),
    )


def all_names() -> list[Names]:
    """Every family's names, to read files of any family."""
    return [names_of(family) for family in FAMILIES.values()]


def read_adapter(path: Path) -> AdapterWeights:
    """The weights of a file of any readable kind by diffusers' module names, whichever program wrote it.

    Raises UsageError for other files.
    """
    from lora_trainer.lora_format import reading

    return with_family(reading.read_adapter(path, all_names()))


def read_lora(path: Path) -> LoraWeights:
    """The same of a plain LoRA. Raises UsageError for other kinds too."""
    from lora_trainer.lora_format.reading import only_lora

    return only_lora(path.name, read_adapter(path))


def read_adapter_with_tokens(path: Path) -> AdapterWeights:
    """The same, with the learned tokens that lie beside a file which has none itself, as one in diffusers' form."""
    from lora_trainer.lora_format.reading import read_learned_tokens

    weights = read_adapter(path)
    return weights if weights.embeddings else replace(weights, embeddings=read_learned_tokens(path))


def with_family(weights: AdapterWeights) -> AdapterWeights:
    """The same weights, with their family if names, header or shapes identify it."""
    if weights.family:
        return weights
    known = family_by_header(weights.metadata.get(HINTS[0], ""), weights.modules)
    known = known or family_by_text({name: update.weight_shape for name, update in weights.modules.items()})
    fitting = [] if known else _by_shapes(weights)
    return replace(weights, family=known or (fitting[0] if len(fitting) == 1 else None))


def convert_lora(
    path: Path, target: Path, to: Form, *, family: str | None = None, dtype: torch.dtype | None = None
) -> Converted:
    """Write a LoRA file in another format; its header is completed with the base model's names.

    Raises UsageError for a file that is no LoRA, for content that the format cannot hold, and where `family` is needed.
    """
    from lora_trainer.lora_format.reading import only_lora

    file = read_source(path, beside=to == "kohya")
    only_lora(path.name, file.weights)
    names = names_for(path, file.weights, family, file.numbered)
    return _written(file, target, to, names, dtype)


def read_source(path: Path, *, beside: bool = True) -> SourceFile:
    """A file of any readable kind with the form that it is in, and the learned tokens that lie `beside` it. Raises UsageError."""
    from lora_trainer.core.tensorfile import read_tensor_header
    from lora_trainer.lora_format.convert import SourceFile, earlier_of

    weights = read_adapter_with_tokens(path) if beside else read_adapter(path)
    keys = list(read_tensor_header(path))
    is_kohya = any(key.endswith(KOHYA_DOWN) or key.startswith(WITHOUT_DOTS) for key in keys)
    form: Form = "kohya" if is_kohya else "diffusers"
    earlier = earlier_of(weights.metadata)
    numbered = any(key.startswith(NUMBERED) for key in keys) or (earlier is not None and earlier.numbered)
    return SourceFile(weights, form, numbered)


def write_source(file: SourceFile, target: Path, to: Form, *, family: str | None = None) -> Converted:
    """Write weights in a format, with the header completed with the base model's names. Raises UsageError as `convert_lora`."""
    return _written(file, target, to, names_for(target, file.weights, family, file.numbered), None)


def write_weights(
    weights: AdapterWeights, target: Path, to: Form, *, family: str | None, numbered: bool, dtype: torch.dtype
) -> tuple[Path, ...]:
    """Write changes of any kind in a format and type, with the header completed; the files. Raises UsageError as `write_kind`."""
    from lora_trainer.lora_format.convert import write_kind

    names = names_for(target, weights, family, numbered)
    return write_kind(_with_base(weights, names.family), target, to, names, all_names(), dtype=dtype)


def _written(file: SourceFile, target: Path, to: Form, names: Names, dtype: torch.dtype | None) -> Converted:
    from lora_trainer.lora_format.convert import convert

    based = replace(file, weights=_with_base(file.weights, names.family))
    return convert(based, target, to, names, all_names(), dtype=dtype)


def names_for(path: Path, weights: AdapterWeights, family: str | None, numbered: bool) -> Names:
    """The names of a LoRA's family, `path` for messages. Raises UsageError where neither the file nor the user names it, or both
    do and contradict each other."""
    if problems := wrong_family(path, weights, family):
        raise UsageError(problems)
    if known := family or weights.family:
        return names_of(FAMILIES[known])
    components = {module.partition(".")[0] for module in weights.modules}
    for names in all_names():  # U-Nets of unknown size: those with as many text encoders have the same names
        numbering_fits = not numbered or names.prefixes.get("text_encoder") == NUMBERED
        if names.denoiser == "unet" and components <= set(names.prefixes) and numbering_fits:
            return names
    message = f"{path.name} does not tell which family of models it is for."
    raise UsageError(Problem("family_unknown", message, f"Name it: --family {'|'.join(FAMILIES)}."))


def wrong_family(path: Path, weights: AdapterWeights, family: str | None) -> list[Problem]:
    """Why a file cannot be of the family that the user names: its names, header or shapes identify another one."""
    found = families_of(weights) if family else []
    if not family or not found or {family, FAMILIES[family].lora_files.like} & {*found}:
        return []
    message = f"--family is {family}, but {path.name} is for {' or '.join(found)}."
    return [Problem("family_differs", message, f"Remove --family, or use a file for {family}.")]


def families_of(weights: AdapterWeights) -> list[str]:
    """The families that a file may be for: one where names, header or shapes identify it, else all with such a denoiser."""
    if weights.family:
        return [weights.family]
    denoisers = {module.partition(".")[0] for module in weights.modules if not module.startswith("text_encoder")}
    kin = [name for name, family in FAMILIES.items() if denoisers == {family.denoiser.component}]
    by_name = [name for name in kin if knows(FAMILIES[name], weights.modules)]
    return _by_shapes(weights) or by_name or kin


def knows(family: Family, modules: Iterable[str]) -> bool:
    """Whether all names of a file's denoiser are of layers that the family has; True for one whose layers are not known."""
    layout, published = family.lora_files.layout, published_layers().get(family.name, ())
    for module in modules:
        component, _, name = module.partition(".")
        if component.startswith("text_encoder"):
            continue
        is_published = any(split_numbers(name)[0] in model for model in published)
        if (layout or published) and not is_published and not rule_of(layout, name):
            return False
    return True


def _with_base(weights: AdapterWeights, family: str) -> AdapterWeights:
    """The header completed with the base model's names, as far as all models of the family share them."""
    if weights.family is None or "ss_base_model_version" in weights.metadata:
        return weights
    facts = public_architecture(family).facts
    kinds = [replace(facts, variant=variant) for variant in (facts.variant, "")]
    kinds += [replace(facts, prediction=prediction) for prediction in PREDICTIONS]
    versions, architectures = (
        set(values) for values in zip(*map(FAMILIES[family].lora_files.base_names, kinds), strict=True)
    )
    base = {
        "ss_v2": str(all(version.startswith("sd_v2") for version in versions)),
        "ss_network_module": "networks.lora",
    }
    for key, values in (("ss_base_model_version", versions), ("modelspec.architecture", architectures)):
        base |= {key: values.pop()} if len(values) == 1 else {}
    return replace(weights, metadata={**base, **weights.metadata})


def family_by_header(version: str, modules: Iterable[str]) -> str | None:
    """The family whose base model a header names, if the file has such a denoiser: of several, by the most letters."""
    denoisers = {module.partition(".")[0] for module in modules if not module.startswith("text_encoder")}
    found: dict[str, int] = {}
    for name, family in FAMILIES.items():
        if not version or not denoisers <= {family.denoiser.component}:
            continue
        known, _ = family.lora_files.base_names(public_architecture(name).facts)
        if version.startswith(known) or known.startswith(version):
            found[name] = min(len(known), len(version))
    return max(found, key=lambda name: found[name], default=None)


def _by_shapes(weights: AdapterWeights) -> list[str]:
    """The families whose published models have all of the denoiser's modules in these shapes.

    Of several, it is the one whose last blocks the file has: LoRAs train all blocks, and families share names and widths.
    """
    fitting = {
        name: max(_fit(weights, family.denoiser.component, model) for model in published_layers()[name])
        for name, family in FAMILIES.items()
        if name in published_layers()
    }
    best = max(fitting.values(), default=0)
    return [name for name, fit in fitting.items() if fit == best > 0]


def _fit(weights: AdapterWeights, component: str, model: PublishedModel) -> int:
    """0 where a module is not in the model, or has another shape there; 2 where the model's last blocks are trained."""
    has_last = dict[str, bool]()
    for module, update in weights.modules.items():
        own, _, name = module.partition(".")
        if own.startswith("text_encoder"):
            continue
        plain, numbers = split_numbers(name)
        layers = model.get(plain)
        if own != component or layers is None:
            return 0
        if any(number > last for number, last in zip(numbers, layers.last, strict=True)):
            return 0
        # Factors may not tell the kernel, or anything but the outputs.
        flat = [[shape[0], math.prod(shape[1:])] for shape in layers.shapes]
        if list(update.weight_shape) not in [*layers.shapes, *flat, *([shape[0]] for shape in layers.shapes)]:
            return 0
        if numbers:
            block = name.partition(".")[0]
            has_last[block] = has_last.get(block, False) or numbers[0] == layers.last[0]
    if not weights.modules or all(module.startswith("text_encoder") for module in weights.modules):
        return 0
    return 2 if all(has_last.values()) else 1


def family_by_text(shapes: Mapping[str, Sequence[int]]) -> str | None:
    """The U-Net's family by the width of the text that it reads: `shapes` are those of the modules' weights.

    None where a name is of no published U-Net: models for videos read texts of the same widths.
    """
    widths = {shape[-1] for name, shape in shapes.items() if name.endswith((".attn2.to_k", ".attn2.to_v"))}
    modules = [name for name in shapes if name.startswith("unet.")]
    for name, family in FAMILIES.items():
        if family.denoiser.component == "unet":
            width = public_architecture(name).denoiser.get("cross_attention_dim")
            names = {split_numbers(module.partition(".")[2])[0] for module in modules}
            if modules and width in widths and any(names <= set(model) for model in published_layers().get(name, ())):
                return name
    return None


def inspect_lora(path: Path) -> Inspected:
    """The content and family of a LoRA file. Raises UsageError for other files, saying what they are."""
    from lora_trainer.lora_format.inspection import inspect

    found = inspect(path, all_names())
    return replace(found, weights=with_family(found.weights))
