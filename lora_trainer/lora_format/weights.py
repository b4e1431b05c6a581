"""The weights of a LoRA, independent of how a file names them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from lora_trainer.core.errors import Problem, TrainingFailed, nearest

# Under this the fp16 rounding of the largest entry is coarser than fp16's own precision.
SMALLEST_FOR_FP16 = 2.0**-13


Product = Callable[[Tensor], Tensor]


class LayerUpdate(Protocol):
    """The trained change of one layer's weight, of any kind of adapter."""

    @property
    def algorithm(self) -> str:
        """Its kind as headers name it: `lora`, `lokr`."""

    @property
    def title(self) -> str:
        """Its kind as people name it: `LoRA`, `LoKr`."""

    @property
    def needs_weight(self) -> bool:
        """Whether `delta` depends on the base model's weight."""

    @property
    def rank(self) -> int: ...

    @property
    def alpha(self) -> float | None: ...

    @property
    def scale(self) -> float:
        """alpha / rank where it counts, else 1."""

    @property
    def finite(self) -> bool: ...

    @property
    def norm(self) -> float:
        """The Frobenius norm of the change, as far as it does not depend on the base model's weight."""

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the weight that it changes; `[out, in * k * k]` or `[out]` where its tensors do not tell more."""

    def delta(self, weight: Tensor | None = None) -> Tensor:
        """The change of the weight in fp32; `weight` is the base model's. Raises ValueError where it is needed."""

    def rounded(self, dtype: torch.dtype) -> LayerUpdate:
        """The same change as files store it: cast once to `dtype`, contiguous, on the CPU."""

    def parts(self) -> Mapping[str, Tensor]:
        """The tensors of a file, by the end of their names."""

    def to(self, device: torch.device) -> LayerUpdate:
        """The same change on a device."""

    def act(self, output: Tensor, product: Product) -> Tensor:
        """The change of a layer's output; `product` multiplies its input by a weight in place of its own.

        One that depends on the base model's weight must be prepared first (`updates.on_base`).
        """


@dataclass(frozen=True)
class LoraPair:
    """The update of one module: delta = up @ down * alpha / rank.

    `down` is `[r, in]`, or `[r, in, k, k]` for a convolution; `up` is `[out, r]`, or `[out, r, 1, 1]`.
    """

    down: Tensor
    up: Tensor
    alpha: float
    algorithm: ClassVar[str] = "lora"
    title: ClassVar[str] = "LoRA"
    needs_weight: ClassVar[bool] = False

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def finite(self) -> bool:
        return bool(self.down.isfinite().all() and self.up.isfinite().all()) and math.isfinite(self.alpha)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.up.shape[0], *self.down.shape[1:])

    @property
    def norm(self) -> float:
        """In float64, without the product of large tensors."""
        return product_norm(self.up.double().flatten(1) * self.scale, self.down.double().flatten(1))

    def delta(self, weight: Tensor | None = None) -> Tensor:
        """The change of the module's weight in fp32: `[out, in]`, or `[out, in, k, k]`."""
        down = self.down.float()
        change = self.up.float().flatten(1) @ down.flatten(1) * self.scale
        return change.reshape(self.up.shape[0], *down.shape[1:])

    def rounded(self, dtype: torch.dtype) -> LoraPair:
        """With alpha / rank folded into `up` in fp32, so that clients that never read alpha apply the right scale."""
        down, up = self.down.detach().float().cpu(), self.up.detach().float().cpu()
        if self.scale != 1.0:
            up = up * self.scale
        largest = float(up.abs().max()) if up.numel() else 0.0
        if 0.0 < largest < SMALLEST_FOR_FP16:
            # A power of two moved from down to up changes no product and keeps up out of fp16's subnormals.
            shift = 2.0 ** round((math.log2(float(down.abs().max()) or 1.0) - math.log2(largest)) / 2)
            if shift > 1.0:
                up, down = up * shift, down / shift
        return LoraPair(down.to(dtype).contiguous(), up.to(dtype).contiguous(), float(self.rank))

    def parts(self) -> Mapping[str, Tensor]:
        alpha = torch.tensor(self.alpha, dtype=torch.float32)
        return {"lora_down.weight": self.down, "lora_up.weight": self.up, "alpha": alpha}

    def to(self, device: torch.device) -> LoraPair:
        return LoraPair(self.down.to(device), self.up.to(device), self.alpha)

    def act(self, output: Tensor, product: Product) -> Tensor:
        return product(self.delta())


def product_norm(up: Tensor, down: Tensor) -> float:
    """The Frobenius norm of up @ down."""
    if min(up.shape[0], down.shape[1]) <= up.shape[1]:
        return float((up @ down).norm())
    return float((torch.linalg.qr(up).R @ torch.linalg.qr(down.T.contiguous()).R.T).norm())


@dataclass(frozen=True)
class AdapterWeights:
    """All updates by module name (component first: `unet.mid_block…`), with the file's header if read from one.

    `embeddings` are learned tokens, by `WORD.clip_l` (or `WORD.string_to_param.*`), as [tokens, width].
    `family` is the one whose names the file has, where that is clear.
    """

    modules: Mapping[str, LayerUpdate]
    metadata: Mapping[str, str] = field(default_factory=dict)
    embeddings: Mapping[str, Tensor] = field(default_factory=dict)
    family: str | None = None

    def not_finite(self) -> list[str]:
        """Names of modules, and of learned tokens, that hold NaN or infinity."""
        embeddings = [name for name, tensor in self.embeddings.items() if not bool(tensor.isfinite().all())]
        return [name for name, update in self.modules.items() if not update.finite] + embeddings


@dataclass(frozen=True)
class LoraWeights(AdapterWeights):
    """Low-rank updates, independent of how a file names them."""

    modules: Mapping[str, LoraPair]


def plain_pairs(weights: AdapterWeights) -> LoraWeights | None:
    """The same weights where all of them are low-rank pairs, else None."""
    pairs = {name: update for name, update in weights.modules.items() if isinstance(update, LoraPair)}
    is_plain = len(pairs) == len(weights.modules)
    return LoraWeights(pairs, weights.metadata, weights.embeddings, weights.family) if is_plain else None


W = TypeVar("W", bound=AdapterWeights)


def weights_from_peft(
    state: Mapping[str, Tensor], component: str, alpha: float | Mapping[str, float] | None = None
) -> LoraWeights:
    """The weights in a peft state dict of one component of the pipeline (`unet`, `text_encoder`).

    `alpha` is one number, or one per module name without the component; None means alpha = rank.
    Reads the keys of `get_peft_model_state_dict` and of a model's own `state_dict`, in which the
    adapter's name comes before `weight`. Raises ValueError for half a pair.
    """
    pattern = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight")
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if match := pattern.fullmatch(key):
            halves.setdefault(match["module"], {})[match["half"]] = tensor
    modules = {}
    for module, pair in halves.items():
        if set(pair) != {"A", "B"}:
            raise ValueError(f"{module} has only lora_{'/'.join(pair)}")
        own = alpha.get(module) if isinstance(alpha, Mapping) else alpha
        name = module_name(component, module)
        modules[name] = LoraPair(pair["A"], pair["B"], float(pair["A"].shape[0] if own is None else own))
    return LoraWeights(modules)


def module_name(component: str, module: str) -> str:
    """A module's name in a LoRA file of diffusers: `unet.mid_block…`."""
    return f"{component}.{_with_text_model(component, module)}"


def _with_text_model(component: str, module: str) -> str:
    # transformers >= 5.6 dropped `text_model` from CLIPTextModel; files keep it, or other clients ignore the keys.
    others = ("text_model.", "text_projection", "encoder.block.")  # the last are T5's
    if component.startswith("text_encoder") and not module.startswith(others):
        return f"text_model.{module}"
    return module


def folded(weights: W, dtype: torch.dtype = torch.float16) -> W:
    """The same updates with alpha = rank, cast once to `dtype`, contiguous, on the CPU.

    alpha / rank goes into `up` in fp32, so clients that never read alpha see the right scale.
    Raises TrainingFailed when a value is not finite, before or after the cast.
    """
    bad = weights.not_finite()
    if bad:
        first = f"{len(bad)} of {len(weights.modules)} LoRA modules hold NaN or infinity (first: {bad[0]})."
        raise TrainingFailed(Problem("lora_not_finite", first, "Lower optimizer.learning_rate and train again."))
    modules = {name: pair.rounded(dtype) for name, pair in weights.modules.items()}
    embeddings = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in weights.embeddings.items()}
    result = replace(weights, modules=modules, embeddings=embeddings)
    bad = result.not_finite()
    if bad:
        first = f"{len(bad)} LoRA modules are too large for {str(dtype).removeprefix('torch.')} (first: {bad[0]})."
        raise TrainingFailed(
            Problem("weights_too_large", first, "The training diverged: lower optimizer.learning_rate.")
        )
    return result


def check_keys(weights: AdapterWeights, module_shapes: Mapping[str, tuple[int, ...]]) -> list[Problem]:
    """Where a LoRA does not fit a model: `module_shapes` maps module names to weight shapes `(out, in, …)`."""
    problems = []
    for name, pair in weights.modules.items():
        shape = module_shapes.get(name)
        if shape is None:
            near = nearest(name, module_shapes) if len(module_shapes) < 20 else ""
            fix = f"Was it trained on another kind of model? {near}".strip()
            problems.append(Problem("lora_of_other_model", f"{name} is no module of the model.", fix))
            continue
        ours = pair.weight_shape
        # Factors may not tell the kernel, or anything but the outputs.
        like = [tuple(shape)] if isinstance(pair, LoraPair) else [shape, (shape[0], math.prod(shape[1:])), shape[:1]]
        if ours not in map(tuple, like):
            problems.append(
                Problem(
                    "lora_of_other_model",
                    f"{name} is {list(ours)} in the LoRA and {list(shape)} in the model.",
                    "Use its own base model.",
                )
            )
    return problems


def adaptable_modules(components: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Linear | torch.nn.Conv2d]:
    """All linear layers and convolutions by the names that LoRA files use: `{"unet": unet}` -> `unet.conv_in`, …"""
    return {
        f"{component}.{_with_text_model(component, name)}": module
        for component, model in components.items()
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    }


def shapes_of(components: Mapping[str, torch.nn.Module]) -> dict[str, tuple[int, ...]]:
    """Weight shapes by module name of all linear layers and convolutions, for `check_keys`."""
    return {name: _shape(module) for name, module in adaptable_modules(components).items()}


def _shape(layer: torch.nn.Linear | torch.nn.Conv2d) -> tuple[int, ...]:
    """By the layer's own numbers: a weight that is stored in fewer bits may have another shape."""
    if isinstance(layer, torch.nn.Linear):
        return (layer.out_features, layer.in_features)
    return (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
