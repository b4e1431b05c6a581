"""LoRA files, written whole and verified."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.disk import refusal
from lora_trainer.core.errors import TrainingFailed
from lora_trainer.core.io import atomic_path
from lora_trainer.lora_format import diffusers as diffusers_form
from lora_trainer.lora_format import kohya as kohya_form
from lora_trainer.lora_format.keys import EMBEDDING, ONE_TEXT_ENCODER
from lora_trainer.lora_format.layouts import Names, rule_of
from lora_trainer.lora_format.metadata import TrainingFacts, header, with_hashes
from lora_trainer.lora_format.reading import ONE_ENCODER_SLOT
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights, check_keys, folded

if TYPE_CHECKING:
    from lora_trainer.lora_format.kinds.lora import LoraPair

TensorsAndHeader = tuple[Mapping[str, Tensor], Mapping[str, str]]


@dataclass(frozen=True)
class FileLayout:
    """How tensors are stored and named. `shapes` are the model's weight shapes by module name, as `shapes_of` gives
    them, which names are checked against; `names` are the family's; `forms` lays out another kind of adapter.
    """

    dtype: torch.dtype = torch.float16
    shapes: Mapping[str, tuple[int, ...]] | None = None
    names: Names = ONE_TEXT_ENCODER
    forms: FileForms | None = None


def write_lora(
    folder: Path, name: str, weights: AdapterWeights, facts: TrainingFacts, layout: FileLayout = FileLayout()
) -> tuple[Path, Path]:
    """Write `NAME.safetensors` (kohya) and `NAME.diffusers.safetensors`; return both paths.

    Both hold the same tensors: alpha / rank folded into up, alpha = rank. Each is verified before it takes its name.
    Raises TrainingFailed, and writes nothing, when a value is not finite or a module does not fit the layout's shapes.
    """
    ready = folded(weights, layout.dtype)
    if layout.shapes is not None and (problems := check_keys(ready, layout.shapes)):
        raise TrainingFailed(problems)
    kohya, diffusers = (layout.forms or lora_forms)(ready, layout.names)
    kohya_path, diffusers_path = folder / f"{name}.safetensors", folder / f"{name}.diffusers.safetensors"
    about, about_diffusers = ({**header(facts, form.weights), **form.header} for form in (kohya, diffusers))
    write_tensors(kohya_path, kohya.tensors, with_hashes(kohya.tensors, about))
    write_tensors(diffusers_path, diffusers.tensors, {**about_diffusers, "format": "pt"})
    return kohya_path, diffusers_path


@dataclass(frozen=True)
class FileForm:
    """The tensors of one file, the same as weights, and what its header has besides the run's facts."""

    tensors: Mapping[str, Tensor]
    weights: AdapterWeights
    header: Mapping[str, str] = field(default_factory=dict)


# The weights, as files store them, and the family's names -> kohya's form and diffusers' form.
FileForms = Callable[[AdapterWeights, Names], tuple[FileForm, FileForm]]


def lora_forms(updates: AdapterWeights, names: Names) -> tuple[FileForm, FileForm]:
    """A LoRA in kohya's form and in diffusers' form; its updates are low-rank ones."""
    weights = LoraWeights(cast("Mapping[str, LoraPair]", updates.modules), embeddings=updates.embeddings)
    one_alpha = kohya_form.one_alpha(weights, names)
    kohya, fused = kohya_form.kohya_tensors(one_alpha, names)
    adapter = {diffusers_form.ADAPTER_METADATA_KEY: diffusers_form.adapter_metadata(weights)}
    return (
        FileForm(kohya, one_alpha, fused),
        FileForm(diffusers_form.diffusers_tensors(weights), weights, adapter),
    )


def plain_forms(weights: AdapterWeights, names: Names) -> tuple[FileForm, FileForm]:
    """Each update's parts behind its module's name: as LyCORIS, ComfyUI and A1111 read them, and in peft's names.

    Layers that the original's code fuses cannot be joined as pairs can. So transformers with such layers have LyCORIS' names,
    which are diffusers' own: ComfyUI puts each on its rows of the fused layer. Others have kohya's, which ComfyUI
    knows of every family.
    """
    is_fused = any(len(rule.shares) > 1 for rule in names.layout)
    kohya: dict[str, Tensor] = {f"{EMBEDDING}{word}": tensor for word, tensor in weights.embeddings.items()}
    diffusers: dict[str, Tensor] = {}
    for module, update in weights.modules.items():
        component, _, rest = module.partition(".")
        if component != names.denoiser or not names.layout:
            name = kohya_form.plain_name(module, names)
        elif is_fused or not (ruled := rule_of(names.layout, rest)):
            name = f"lycoris_{rest.replace('.', '_')}"
        else:
            name = f"{names.prefixes[component]}_{ruled[1].replace('.', '_')}"
        kohya |= {f"{name}.{end}": tensor for end, tensor in update.parts().items()}
        diffusers |= {f"{module}.{end}": tensor for end, tensor in update.peft_parts().items()}
    return FileForm(kohya, weights), FileForm(diffusers_form.with_first_pair_first(diffusers), weights)


def write_learned_tokens(
    folder: Path, name: str, weights: AdapterWeights, *, dtype: torch.dtype = torch.float16
) -> list[Path]:
    """Write each learned token as a file of its own, `NAME.embedding-WORD.safetensors`, as ComfyUI, A1111 and diffusers load it.

    All of them or none. Raises OSError as `write_together`.
    """
    files = learned_token_files(folder, name, weights, dtype)
    write_together(files)
    return list(files)


def learned_token_files(
    folder: Path, name: str, weights: AdapterWeights, dtype: torch.dtype
) -> dict[Path, TensorsAndHeader]:
    """The files of the learned tokens, each with its tensors and header.

    The embeddings of the only text encoder are called `emb_params`, others as in the LoRA (`clip_l`, `t5`).
    """
    tokens: dict[str, dict[str, Tensor]] = {}
    for key, tensor in folded(LoraWeights({}, embeddings=weights.embeddings), dtype).embeddings.items():
        token, _, slot = key.partition(".")
        tokens.setdefault(token, {})["emb_params" if slot == ONE_ENCODER_SLOT else slot] = tensor
    files: dict[Path, TensorsAndHeader] = {}
    for token, tensors in tokens.items():
        plain = re.sub(r"[^\w-]", "", token) or "word"
        path = folder / f"{name}.embedding-{plain}.safetensors"
        if path in files:
            path = folder / f"{name}.embedding-{plain}-{len(files) + 1}.safetensors"
        files[path] = tensors, {"name": token, "format": "pt"}
    return files


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, reading it back before it takes its name. Raises OSError as `write_together`."""
    write_together({path: (tensors, metadata)})


def write_together(
    files: Mapping[Path, TensorsAndHeader],
    check: Callable[[Path, Mapping[str, Tensor]], None] = lambda path, back: None,
) -> None:
    """Write safetensors files that belong together. The first takes its name last, and none does before all are whole.

    `check` may refuse what was read back, by raising. Raises OSError when the disk refuses, or what is read back differs
    from what was written; files that have the names already are unchanged then.
    """
    with ExitStack() as stack:
        for path, (tensors, metadata) in files.items():
            temporary = stack.enter_context(atomic_path(path))
            try:
                save_file({key: _own(tensor) for key, tensor in tensors.items()}, temporary, metadata=dict(metadata))
            except SafetensorError as error:  # only its message shows that it is a disk error
                raise OSError(refusal(error) or errno.EIO, str(error), str(path)) from error
            back = load_file(temporary)
            if set(back) != set(tensors) or not all(torch.equal(back[key], tensors[key]) for key in tensors):
                raise OSError(f"{path.name} reads back differently from what was written")
            check(path, back)


def _own(tensor: Tensor) -> Tensor:
    """A tensor with memory of its own: the parts of a fused layer share theirs, which safetensors refuses."""
    return tensor.clone(memory_format=torch.contiguous_format)
