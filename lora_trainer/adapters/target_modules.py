"""The modules that an adapter of any kind is put on."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from lora_trainer.core.errors import Problem, UsageError, nearest

if TYPE_CHECKING:
    from lora_trainer.models.family import DenoiserSpec


def matching_modules(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the linear and convolution modules that match one of the patterns."""
    adaptable = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d))
    return [name for name in adaptable if any(fnmatchcase(name, pattern) for pattern in patterns)]


def target_modules(denoiser: nn.Module, spec: DenoiserSpec, targets: str | tuple[str, ...]) -> list[str]:
    """Names of the modules that `lora.target_modules` selects. Raises UsageError when a pattern matches none.

    A value is `attention`, `attention+ff`, or patterns (`*.attn2.to_k`) of linear and convolution modules. Modules whose
    output is unused are skipped.
    """
    unread = unread_modules(denoiser) | set(spec.unread(denoiser))
    adaptable = [name for name in matching_modules(denoiser, ("*",)) if name not in unread]
    named = spec.lora_targets.get(targets) if isinstance(targets, str) else None
    patterns = named or ((targets,) if isinstance(targets, str) else targets)
    problems = [
        Problem(
            "pattern_matches_nothing",
            f"lora.target_modules: {pattern!r} matches none of {len(adaptable)} modules.",
            f"Set {', '.join(spec.lora_targets)}, or a pattern such as '*.attn2.to_k'. {nearest(pattern, spec.lora_targets)}",
        )
        for pattern in (patterns if named is None else ())
        if not any(fnmatchcase(name, pattern) for name in adaptable)
    ]
    if problems:
        raise UsageError(problems)
    return [name for name in adaptable if any(fnmatchcase(name, pattern) for pattern in patterns)]


def unread_modules(denoiser: nn.Module) -> set[str]:
    """Names of modules whose output is unused: text queries of an attention without text output (SD3's last)."""
    return {
        f"{name}.add_q_proj" for name, module in denoiser.named_modules() if getattr(module, "context_pre_only", None)
    }
