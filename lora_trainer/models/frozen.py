"""Load one part of a model: build it from its config and fill it from its files, after both were checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.core.errors import Problem, UsageError, is_out_of_memory
from lora_trainer.core.findings import printable
from lora_trainer.models.folder import COPY, check_part, places_of_weights, read_config
from lora_trainer.models.places import Place, is_laid_out, read_places

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lora_trainer.models.quantization.store import Narrow

# Tied weights are once in a file and twice in a model.
MOST_TIMES_STORED = 2
# Parts of names that transformers has put into its modules' names, or taken out, since files were written.
PREFIXES = ("text_model", "model", "model.language_model", "language_model.model", "language_model")
SHOWN_OF_REASON = 200  # characters


class _TooLargeError(Exception):
    """A config that asks for more numbers than its weights can fill."""


def load_frozen(
    kind: Any,
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    narrow: Narrow | None = None,
    crop: Callable[[nn.Module, dict[str, Place]], None] | None = None,
) -> Any:
    """One part of a model, frozen, in eval mode, loaded layer by layer; `narrow` quantizes each.

    `kind` is a class of diffusers or transformers. The weights are those of its own `from_pretrained`, to the bit; without
    `dtype` they keep the stored precision. `crop` may make the model and its places smaller before anything is read.
    Raises UsageError for a part that `check_part` refuses, whose config asks for more than its weights hold, which lacks weights
    (a library would fill them with random numbers), or which the library cannot build.
    """
    from lora_trainer.models.quantization.layers import fill_layers, fill_the_rest

    stored_numbers = check_part(folder)
    places = places_of_weights(folder)
    try:
        model = check_size(lambda: _empty(kind, folder), stored_numbers, folder)
        places = _as_named(model, places)
        refuse_lacking(folder, set(model.state_dict()) - set(places))
        if crop is not None:
            crop(model, places)
        fill_layers(model, places, dtype, device, narrow, kept_wide(kind, dtype))
        fill_the_rest(model, lambda: _empty(kind, folder), device)
    except UsageError:
        raise
    except Exception as error:  # libraries raise every kind for a part that is not what they expect
        raise _as_usage(error, folder) from error
    return model.eval().requires_grad_(False)


def _as_named(model: nn.Module, places: Mapping[str, Place]) -> dict[str, Place]:
    """The places by the names that this version of its library has for the model's weights."""
    found = dict(places)
    if hasattr(model, "_fix_state_dict_keys_on_load"):  # attention of the first VAEs, in diffusers
        model._fix_state_dict_keys_on_load(found)  # type: ignore[operator]
    for name in model.state_dict():
        for prefix in PREFIXES:
            bare = name.removeprefix(f"{prefix}.")
            for other in (f"{prefix}.{name}", bare, f"model.{bare}"):
                if name not in found and other in places:
                    found[name] = places[other]
    tensors = model.state_dict(keep_vars=True)
    known = {id(tensors[name]): place for name, place in found.items() if name in tensors}
    return {
        name: known[id(own)] for name, own in tensors.items() if id(own) in known
    }  # tied weights are once in a file


def kept_wide(kind: Any, dtype: torch.dtype | None) -> tuple[str, ...]:
    """Names of modules that their library keeps in fp32: where the rest is fp16, since they overflow; diffusers in bf16, too."""
    import torch

    kept = dtype == torch.float16 or (dtype == torch.bfloat16 and hasattr(kind, "load_config"))
    return tuple(getattr(kind, "_keep_in_fp32_modules", None) or ()) if kept else ()


def widen_kept(module: nn.Module, dtype: torch.dtype) -> None:
    """Put back in fp32 what its library keeps so, of a module that was cast to `dtype` as a whole."""
    import torch

    wide = set(kept_wide(type(module), dtype))
    for path, part in module.named_modules() if wide else ():
        if not wide.isdisjoint(path.split(".")):
            torch.nn.Module.to(part, torch.float32)


def load_tokenizer_folder(kind: Any, folder: Path) -> Any:
    """A tokenizer. Raises UsageError for one that cannot be loaded."""
    try:
        return kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        raise _as_usage(error, folder) from error


def _empty(kind: Any, folder: Path) -> nn.Module:
    """The part as its config describes it, on the meta device."""
    if hasattr(kind, "load_config"):  # diffusers
        return cast("nn.Module", kind.from_config(kind.load_config(folder, local_files_only=True)))
    return cast("nn.Module", kind(kind.config_class.from_pretrained(folder, local_files_only=True)))


def empty_text_encoder(folder: Path) -> nn.Module:
    """T5, or CLIP with a projection whether it has one or not, as its config describes it, on the meta device.

    Raises UsageError as `load_frozen`.
    """
    from transformers import CLIPTextModelWithProjection, T5EncoderModel

    kind = (
        T5EncoderModel if read_config(folder, "config.json").get("model_type") == "t5" else CLIPTextModelWithProjection
    )
    try:
        return check_size(lambda: _empty(kind, folder), check_part(folder), folder)
    except UsageError:
        raise
    except Exception as error:  # as above
        raise _as_usage(error, folder) from error


def check_size(build: Callable[[], nn.Module], stored_numbers: int, folder: Path) -> nn.Module:
    """The model from `build`, without memory. Raises UsageError when the `stored_numbers` of its weights cannot fill it.

    Building stops at the limit: a config of a few bytes may ask for terabytes.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook

    needed, limit = 0, MOST_TIMES_STORED * stored_numbers

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal needed
        needed += 0 if parameter is None else parameter.numel()
        if needed > limit:
            raise _TooLargeError

    hook = register_module_parameter_registration_hook(count)
    try:
        with torch.device("meta"):
            return build()
    except _TooLargeError:
        message = f"{folder / 'config.json'} asks for more than {needed:,} weights; the files hold {stored_numbers:,}."
        raise UsageError(Problem("model_config_invalid", message, COPY)) from None
    finally:
        hook.remove()


def refuse_lacking(folder: Path, missing: Iterable[str]) -> None:
    """Raise UsageError when weights were not found in the files."""
    if lacking := sorted(missing):
        first, count = lacking[0], len(lacking)
        raise UsageError(
            Problem(
                "model_incomplete",
                f"{_called(folder)} lacks {count} of its weights (first: {first}).",
                "Copy it again.",
            )
        )


def _called(folder: Path) -> str:
    """A part as people know it: by its folder, or by the file that its weights lie in."""
    if not is_laid_out(folder):
        return str(folder)
    files = sorted({str(place.file) for place in read_places(folder).values()})
    return f"{folder.name} of {', '.join(files)}"


def _as_usage(error: Exception, folder: Path) -> Exception:
    """A library's error as a UsageError; running out of memory stays what it is."""
    reason = printable(" ".join(str(error).split())[:SHOWN_OF_REASON])
    if is_out_of_memory(error):
        return error
    return UsageError(
        Problem("model_not_loaded", f"{_called(folder)} cannot be loaded: {type(error).__name__}: {reason}.", COPY)
    )
