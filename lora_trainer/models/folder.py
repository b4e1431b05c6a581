"""A model folder in diffusers' layout: found, checked and described without torch."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from lora_trainer.core.bounded import TextError, read_json_object
from lora_trainer.core.digests import remembered_sha256
from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.core.gguf_file import PACKED_TYPES
from lora_trainer.core.tensorfile import METADATA, elements, read_tensor_header
from lora_trainer.models.places import (
    WEIGHTS,
    Place,
    is_laid_out,
    numbers_of,
    places_digest,
    read_places,
    stored_weights,
)
from lora_trainer.models.weight_files import weights_of

MOST_CONFIG_BYTES = 1 << 24  # those of models with a hundred thousand labels have five megabytes
LARGEST_NUMBER = 10**8  # in a config; the largest honest ones are sizes of vocabularies
COPY = "Copy or download the model again."
UNQUANTISED = (
    "Get it in float16, bfloat16, float32, float8, ComfyUI's fp8 or int8, or as GGUF; memory.weight_dtype narrows it."
)
READ = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", *PACKED_TYPES)
# Ends of the names of scales and the like: without them the stored weights are another model.
QUANTIZED = (
    (".bitsandbytes__nf4", "bitsandbytes in 4 bits"),
    (".bitsandbytes__fp4", "bitsandbytes in 4 bits"),
    (".absmax", "bitsandbytes"),
    (".SCB", "bitsandbytes in 8 bits"),
    (".qweight", "whole numbers"),
    ("weight._data", "whole numbers with scales"),
    ("scaled_fp8", "fp8 with scales"),
    (".scale_weight", "fp8 with scales"),
    (".weight_scale", "fp8 with scales"),
    (".weight_scale_inv", "fp8 with scales"),
    (".comfy_quant", "another program's form"),
)
NEVER_READ = (
    *(".bin", ".bin.index.json", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".pb", ".pt", ".pth"),
    *(".md", ".db", ".ini"),
)
# Keys that make a library read other files than those that were checked, fetch code or run it.
UNTRUSTED = ("quantization_config", "transformers_weights")
ATTENTION = ("attn_implementation", "_attn_implementation", "_attn_implementation_internal", "experts_implementation")
INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"  # of pipelines, and of those of modular blocks
EXPECTED = "Expected a diffusers folder: model_index.json beside unet/, vae/, text_encoder/, tokenizer/, scheduler/."


def read_config(folder: Path, name: str, needs: tuple[str, ...] = (), expected: str = EXPECTED) -> dict[str, Any]:
    """A component's JSON config. Raises UsageError when it is absent (`expected` is the fix), damaged or lacks its `needs`."""
    path = folder / name
    if not path.exists():
        raise UsageError(Problem("file_missing", f"{path} is missing.", expected))
    try:
        value = read_json_object(path, MOST_CONFIG_BYTES)
    except TextError as error:
        raise UsageError(Problem("file_unreadable", f"{path} {error}.", COPY)) from error
    if lacking := [key for key in needs if key not in value]:
        raise UsageError(Problem("model_config_invalid", f"{path} lacks {', '.join(lacking)}.", COPY))
    return value


def index_among(names: Collection[str]) -> str:
    """The file that names a model's pipeline and parts, of the names at the top of a folder or a repository.

    Where a folder has both, diffusers' older form counts, which is also the name where it has none.
    """
    return MODULAR_INDEX if MODULAR_INDEX in names and INDEX not in names else INDEX


def index_path(folder: Path) -> Path:
    """Where that file is, or would be."""
    return folder / index_among([name for name in (INDEX, MODULAR_INDEX) if (folder / name).exists()])


def read_index(folder: Path) -> dict[str, Any]:
    """What names a folder's pipeline and parts. Raises UsageError as `read_config`."""
    return read_config(folder, index_path(folder).name)


def _entries(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every key with its value at any depth of a config; members of a list have the list's key."""
    waiting: list[tuple[str, Any]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting.extend(value.items())
        elif isinstance(value, list):
            waiting.extend((key, each) for each in value)


def named_parts(folder: Path, names: Sequence[str]) -> tuple[str, ...]:
    """The parts that the index does not set to `null` or `[null, null]`."""
    index = read_index(folder)
    return tuple(name for name in names if index.get(name) not in (None, [None, None]))


def tokenizer_of(text_encoder: str) -> str:
    """`tokenizer_2` for `text_encoder_2`."""
    return text_encoder.replace("text_encoder", "tokenizer")


def tokenizer_folder(folder: Path) -> str:
    """The folder of the one tokenizer of a model: `tokenizer`, or what reads images and texts, which may have it."""
    return "processor" if not (folder / "tokenizer").is_dir() and (folder / "processor").is_dir() else "tokenizer"


def whole_number(path: Path, config: Mapping[str, Any], key: str, least: int, most: int) -> int:
    """A number of a config. Raises UsageError when it is none, or not from `least` to `most`."""
    value = config.get(key)
    if type(value) is not int or not least <= value <= most:
        shown = repr(value)[:40]
        raise UsageError(
            Problem(
                "model_config_invalid",
                f"{path}: {key} is {shown}; it must be a whole number from {least} to {most}.",
                COPY,
            )
        )
    return value


def weights_files(folder: Path) -> list[Path]:
    """The safetensors files that hold a component's weights, the full-precision ones where there are others.

    Raises UsageError as `places_of_weights` does.
    """
    return sorted({place.file for place in places_of_weights(folder).values()})


def weights_digest(folder: Path) -> str:
    """A hash of all of a component's weights. Raises UsageError."""
    if is_laid_out(folder):
        return places_digest(read_places(folder))
    digests = [remembered_sha256(path) for path in weights_files(folder)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def shapes_of_weights(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a component, from the headers of its files. Raises UsageError."""
    stored = stored_weights(places_of_weights(folder))
    return {name: tuple(entry["shape"]) for name, entry in stored.items()}


def places_of_weights(folder: Path) -> dict[str, Place]:
    """Where each weight of a component lies: in one file, where the index of several says, or where a laid-out folder does.

    For a part that `check_part` has seen. Raises UsageError for several files without an index, and for an index that
    names weights that its files lack.
    """
    if is_laid_out(folder):
        return read_places(folder)
    first = folder / chosen[0] if (chosen := _complete_set(folder)) else _first_of_weights(folder)
    if first.suffix == ".json":
        index = first
    elif "-of-" in first.name:  # shards that are not all there, or have no index
        stem, _, variant = first.name.partition("-")[0].partition(".")
        index = folder / ".".join([stem, "safetensors.index", *([variant] if variant else []), "json"])
    else:
        return {name: Place(first, name) for name in _names(first)}
    named: dict[str, str] = _check_index(index, {path.name for path in folder.glob("*.safetensors")})
    names: dict[str, set[str]] = {}
    for file in set(named.values()):
        names[file] = _names(folder / file)
    if lacking := sorted(name for name, file in named.items() if name not in names[file]):
        raise UsageError(
            Problem(
                "model_incomplete",
                f"{folder / named[lacking[0]]} lacks {lacking[0][:80]!r}, which its index names.",
                COPY,
            )
        )
    return {name: Place(folder / file, name) for name, file in named.items()}


def _complete_set(folder: Path) -> list[str]:
    """The set of weights that is read from a folder, as of a hub's listing; empty where no names are known."""
    return weights_of([path.name for path in folder.iterdir()]) if folder.is_dir() else []


def _names(path: Path) -> set[str]:
    return set(read_tensor_header(path)) - {METADATA}


def _first_of_weights(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors"), key=lambda path: (len(path.suffixes), path.name))
    if not found:
        pickles = [path.name for path in folder.glob("*.bin")] if folder.is_dir() else []
        reason = f"holds only {pickles[0]}, a pickle" if pickles else "holds no weights"
        raise UsageError(
            Problem(
                "model_unsupported", f"{folder} {reason}.", "Only .safetensors weights are loaded; convert the model."
            )
        )
    return found[0]


_CONFIGS_ALONE: ContextVar[bool] = ContextVar("configs alone", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside the block a part may lack its weights and is known by its config; weights that are here are checked."""
    token = _CONFIGS_ALONE.set(True)
    try:
        yield
    finally:
        _CONFIGS_ALONE.reset(token)


def weights_are_here(folder: Path) -> bool:
    """Whether a part has a complete set of weights, which only inside `without_weights` it may lack."""
    return not _CONFIGS_ALONE.get() or is_laid_out(folder) or bool(_complete_set(folder))


def check_components(folder: Path, components: tuple[str, ...]) -> None:
    """Raise one UsageError with every missing, damaged or hostile file of the components."""
    problems: list[Problem] = []
    for component in components:
        try:
            check_part(folder / component)
        except UsageError as error:
            problems.extend(error.problems)
    if problems:
        raise UsageError(problems)


def check_part(folder: Path) -> int:
    """How many numbers the weights of a part hold, when a library may load it; all its weight files are checked.

    Raises UsageError for weights that are missing, damaged, pickles or no floating point, and for what would make a library read
    other files than these, fetch code or run it: an index that leads elsewhere, an adapter, a config with code of its own.
    """
    if laid_out := is_laid_out(folder):
        stored = stored_weights(places := read_places(folder))
        refuse_quantized(folder, {name: stored[name]["dtype"] for name in stored if places[name].scaled is None})
    elif not (files := sorted(folder.glob("*.safetensors"))) and not _CONFIGS_ALONE.get():
        _first_of_weights(folder)  # raises, naming what is there in place of weights
    if (adapter := folder / "adapter_config.json").exists():
        raise UsageError(
            Problem(
                "model_has_adapter",
                f"{adapter} would put other weights onto these.",
                "Delete it, or merge the adapter.",
            )
        )
    for index in folder.glob("*.safetensors.index.json") if weights_are_here(folder) else ():
        _check_index(index, {path.name for path in folder.glob("*.safetensors")})
    for key, value in _entries(read_config(folder, "config.json")):
        _refuse_entry(folder / "config.json", key, value)
    return numbers_of(stored) if laid_out else sum(elements(_weights_header(path)) for path in files)


def _weights_header(path: Path) -> dict[str, Any]:
    """The header of a file of weights. Raises UsageError as `refuse_quantized` does."""
    header = read_tensor_header(path)
    refuse_quantized(path, {name: entry["dtype"] for name, entry in header.items() if name != METADATA})
    return header


def how_quantized(types: Mapping[str, str]) -> str:
    """How tensors, types by names, are quantized; empty where they are not, or in plain float8.

    A library would take what is stored for the values themselves. Buffers, such as positions, may be whole.
    """
    for ending, how in QUANTIZED:
        if found := next((name for name in types if name.endswith(ending)), None):
            return f"{how}; it holds {found[:80]!r}"
    for name, dtype in types.items():
        if name.endswith((".weight", ".bias")) and dtype not in READ:
            return f"{name[:80]!r} is stored as {dtype}"
    return ""


def refuse_quantized(where: Path, types: Mapping[str, str]) -> None:
    """Raise UsageError for tensors that are not the weights themselves."""
    if how := how_quantized(types):
        raise UsageError(Problem("model_is_quantized", f"{where} is quantized ({how}).", UNQUANTISED))


def _check_index(index: Path, names: set[str]) -> dict[str, str]:
    """What an index says. Raises UsageError unless it names only files of weights that lie beside it."""
    named = read_config(index.parent, index.name).get("weight_map")
    if not isinstance(named, dict):
        raise UsageError(Problem("model_index_invalid", f"{index} lacks weight_map.", COPY))
    if away := [str(value)[:80] for value in named.values() if not isinstance(value, str) or value not in names]:
        raise UsageError(
            Problem("model_index_invalid", f"{index} names {away[0]!r}, which is no file of weights beside it.", COPY)
        )
    return named


def _refuse_entry(path: Path, key: str, value: Any) -> None:
    """Raise UsageError for an entry of a config that asks for code, for files of its own or for what no memory holds."""
    if key in UNTRUSTED and value:
        message = f"{path} has {key}: code or files of its own, which are never used."
        raise UsageError(Problem("model_has_code", message, "Get the model without it."))
    if key in ATTENTION and value not in (None, "eager", "sdpa"):
        message = f"{path}: {key} is {value!r}, which may be code from a hub."
        raise UsageError(Problem("model_has_code", message, "Remove it; hardware.attention_backend chooses."))
    if isinstance(value, int) and abs(value) > LARGEST_NUMBER:
        raise UsageError(
            Problem(
                "model_config_invalid",
                f"{path}: {key} is {value}; no model has more than {LARGEST_NUMBER} of anything.",
                COPY,
            )
        )


def _is_read(name: str, taken: Collection[str]) -> bool:
    """Whether a file beside the weights of `taken` is one that a part is loaded from.

    Other weights, those of other programs, and what file managers leave are not.
    """
    if name.startswith(".") or name.lower().endswith(NEVER_READ):
        return False
    return not taken or name in taken or ".safetensors" not in name


def files_of_part(folder: Path) -> list[Path]:
    """The files that a part of a model is loaded from: its weights, and what lies beside them that is no other weights."""
    taken = set(_complete_set(folder))
    return [path for path in sorted(folder.iterdir()) if path.is_file() and _is_read(path.name, taken)]


def fingerprint(folder: Path, *components: str) -> str:
    """A hash of the components: changes when weights, config or vocabulary change, whatever else lies beside them."""
    digest = hashlib.sha256()
    for component in components:
        taken = set(_complete_set(folder / component))
        for path in sorted((folder / component).iterdir()):
            if path.is_file() and _is_read(path.name, taken):
                # A table of places depends on files and times; only the weights themselves count.
                digest_of_file = weights_digest(path.parent) if path.name == WEIGHTS else remembered_sha256(path)
                line = f"{component}/{path.name}:{digest_of_file}\n"
                digest.update(line.encode("utf-8", "surrogatepass"))  # a name need not be UTF-8
    return digest.hexdigest()[:32]
