"""LoRA files: written whole and verified, read with every problem named."""

from __future__ import annotations

import errno
import glob
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.core.bounded import TextError, read_json_object
from lora_trainer.core.disk import refusal
from lora_trainer.core.errors import Problem, TrainingFailed, UsageError
from lora_trainer.core.io import atomic_path
from lora_trainer.core.tensorfile import is_pickle, read_tensor_header
from lora_trainer.lora_format import diffusers as diffusers_form
from lora_trainer.lora_format import kohya as kohya_form
from lora_trainer.lora_format.keys import EMBEDDING, ONE_TEXT_ENCODER, PEFT, read_key
from lora_trainer.lora_format.layouts import Names, rule_of
from lora_trainer.lora_format.metadata import TrainingFacts, header, with_hashes
from lora_trainer.lora_format.reading import only_lora, some, weights_of
from lora_trainer.lora_format.weights import AdapterWeights, LoraWeights, check_keys, folded

if TYPE_CHECKING:
    from lora_trainer.lora_format.kinds.lora import LoraPair

ONE_ENCODER_SLOT = "string_to_param.*"  # a token's name inside a file, of one text encoder
MOST_CONFIG_BYTES = 1 << 20
TensorsAndHeader = tuple[Mapping[str, Tensor], Mapping[str, str]]
PEFT_CONFIG = "adapter_config.json"  # peft's config beside its file, the only place of alpha


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


def learned_tokens_beside(path: Path) -> list[Path]:
    """The files that are read as a LoRA's learned tokens: those of its name, else those of its name without `.diffusers`."""
    for stem in (path.stem, path.stem.removesuffix(".diffusers")):
        if found := sorted(path.parent.glob(f"{glob.escape(stem)}.embedding-*.safetensors")):
            return found
    return []


def read_learned_tokens(path: Path) -> dict[str, Tensor]:
    """The learned tokens beside a LoRA in diffusers' form, as written by `write_learned_tokens`. Raises UsageError."""
    found: dict[str, Tensor] = {}
    for file in learned_tokens_beside(path):
        tensors, metadata = open_tensors(file)
        token = metadata.get("name", file.stem.partition(".embedding-")[2])
        for slot, tensor in tensors.items():
            found[f"{token}.{ONE_ENCODER_SLOT if slot == 'emb_params' else slot}"] = tensor
    return found


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


def read_adapter(path: Path, families: Sequence[Names] = ()) -> AdapterWeights:
    """Read an adapter file of any readable kind and program, its format detected from its keys; `families` are those whose
    names are known.

    NaN is kept (`AdapterWeights.not_finite` names it). Raises UsageError, with all
    problems at once, for a missing file, pickle, damage, half a pair, a wrong shape, an
    unknown key, a mixture of forms, or another method.
    """
    tensors, metadata = open_tensors(path)
    refuse_reaching(path, metadata, tensors)
    return weights_of(path.name, tensors, metadata, families, beside(path, tensors))


def read_lora(path: Path, families: Sequence[Names] = ()) -> LoraWeights:
    """The same of a plain LoRA. Raises UsageError for other kinds too."""
    return only_lora(path.name, read_adapter(path, families))


def beside(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """peft's own config beside a file in its form; None for other files. Raises UsageError."""
    config = path.with_name(PEFT_CONFIG)
    if not any(key.startswith(PEFT) for key in tensors) or not config.is_file():
        return None
    try:
        document = read_json_object(config, MOST_CONFIG_BYTES)
    except (TextError, OSError) as error:
        raise UsageError(
            Problem("config_unreadable", f"{config} cannot be read: {error}.", "Copy it again, or remove it.")
        ) from None
    if reaching := diffusers_form.reaching_further(document, layers_of(tensors)):
        raise _refused(config, f"asks for more than the file's own weights ({some(reaching)}).", "Export a plain LoRA.")
    return document


def open_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if path.is_dir():
        inside = ", ".join(sorted(file.name for file in path.glob("*.safetensors"))) or "none"
        raise UsageError(
            Problem("path_is_folder", f"{path} is a folder, not a LoRA file.", f"LoRA files in it: {inside}.")
        )
    if not path.exists():
        raise UsageError(Problem("file_missing", f"There is no LoRA file {path}.", "Check the path."))
    if not path.is_file():  # opening a pipe would wait forever
        raise _refused(path, "is not a regular file.", "Name a .safetensors file.")
    with open(path, "rb") as file:
        pickled = is_pickle(file.read(8))
    if pickled or path.suffix.lower() in {".pt", ".ckpt", ".pth", ".bin"}:
        fix = "Pickle can run code when it is read, so it never is: get the file as .safetensors."
        raise _refused(path, "is a pickle file.", fix)
    if path.suffix.lower() != ".safetensors":
        # diffusers would try to read such a file as a pickle, whatever it holds.
        raise _refused(path, "does not end in .safetensors.", "Name a .safetensors file.")
    read_tensor_header(path)  # raises a clear error for damage, before a library reads it
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError) as error:
        size = path.stat().st_size
        fix = f"It is truncated or no safetensors file ({error}): copy or download it again."
        raise _refused(path, f"cannot be read ({size} bytes).", fix) from None
    return tensors, metadata


def layers_of(keys: Iterable[str]) -> list[str]:
    """The names of the layers that keys are of."""
    return list({read.name for key in keys if (read := read_key(key)) is not None})


def refuse_reaching(path: Path, metadata: Mapping[str, str], keys: Iterable[str]) -> None:
    key = diffusers_form.ADAPTER_METADATA_KEY
    try:
        reaching = diffusers_form.reaching_further(diffusers_form.config_in(metadata), layers_of(keys))
    except (ValueError, TypeError):
        raise _refused(path, f"has a header entry {key} that cannot be read.", "Export it again.") from None
    if reaching:
        fix = (
            "Programs would read other files, run code, search without end or change the base model by it: "
            "export it again as a plain LoRA."
        )
        raise _refused(path, f"asks in {key} for more than its own weights ({some(reaching)}).", fix)


def _refused(path: Path, message: str, fix: str) -> UsageError:
    return UsageError(Problem("file_unreadable", f"{path.name} {message}", fix))
