"""The change of one layer's weight, of any kind of adapter, and what is known of a kind.

Importing this and the kinds loads no torch, since commands without it list the kinds: it is imported where it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Product = Callable[[Tensor], Tensor]

TINY = 1e-12  # the least norm that is divided by
PLUS = ("loraplus_lr_ratio", "loraplus_text_encoder_lr_ratio")
# Settings of [lora] that not every kind can follow.
OWN_SETTINGS = (
    "init_lora_weights",
    "rank_pattern",
    "alpha_pattern",
    "dropout_pattern",
    *PLUS,
    "timestep_min_rank",
    "lokr_factor",
)
NO_FACTORS = {"lokr_factor": "only a Kronecker product has factors"}
NO_PROJECTIONS = dict.fromkeys((*PLUS, "init_lora_weights"), "it is about the up and down projections of a LoRA")


class LayerUpdate:
    """The trained change of one layer's weight. Most of it follows from its `tensors`; a kind adds its formula."""

    tells_kernel: ClassVar[bool] = False  # whether `weight_shape` is that of the layer, also of a convolution
    arguments: ClassVar[Mapping[str, object]] = {}  # `ss_network_args` of its own

    if TYPE_CHECKING:  # what each kind has, as a field or computed

        @property
        def algorithm(self) -> str:
            """Its kind as headers name it: LyCORIS' `algo`."""

        @property
        def title(self) -> str:
            """Its kind as people name it."""

        @property
        def tensors(self) -> Mapping[str, Tensor]:
            """Its tensors, by the end of their names in files."""

        @property
        def alpha(self) -> float | None: ...

        @property
        def rank(self) -> int: ...

        @property
        def weight_shape(self) -> tuple[int, ...]:
            """The shape of the weight that it changes; `[out, in * k * k]` or `[out]` where its tensors do not tell more."""

        def delta(self, weight: Tensor | None = None) -> Tensor:
            """The change of the weight in fp32; `weight` is the base model's. Raises ValueError where it is needed."""

        def rounded(self, dtype: torch.dtype) -> LayerUpdate:
            """The same change as files store it: cast once to `dtype`, contiguous, on the CPU."""

        def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
            """The same change with other tensors of the same names."""

    @property
    def needs_weight(self) -> bool:
        """Whether `delta` depends on the base model's weight."""
        return False

    @property
    def in_comfyui(self) -> LayerUpdate:
        """The change that ComfyUI computes from its file: itself, but for a kind that it computes in a way of its own."""
        return self

    @property
    def settings(self) -> tuple[object, ...]:
        """What its formula reads beside tensors and alpha."""
        return ()

    @property
    def scale(self) -> float:
        """alpha / rank where it counts, else 1."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def finite(self) -> bool:
        values = all(bool(each.isfinite().all()) for each in self.tensors.values())
        return values and (self.alpha is None or math.isfinite(self.alpha))

    @property
    def norm(self) -> float:
        """The Frobenius norm of the change, as far as it does not depend on the base model's weight."""
        return float(self.delta().norm())

    @property
    def is_zero(self) -> bool:
        """Whether a factor is zero, so that the change is."""
        return self.norm == 0.0

    @property
    def dtype(self) -> torch.dtype:
        """The type of its factors: magnitudes and alphas are in fp32 in any file."""
        return next(iter(self.tensors.values())).dtype

    def parts(self) -> Mapping[str, Tensor]:
        """The tensors of a file, by the end of their names."""
        import torch

        alpha = {} if self.alpha is None else {"alpha": torch.tensor(self.alpha, dtype=torch.float32)}
        return {**self.tensors, **alpha}

    def peft_parts(self) -> Mapping[str, Tensor]:
        """The same by peft's names. Alpha is in the tensors, and diffusers refuses its key."""
        return {end: tensor for end, tensor in self.parts().items() if end != "alpha"}

    def to(self, device: torch.device) -> Self:
        """The same change on a device."""
        return self.with_tensors({name: each.to(device) for name, each in self.tensors.items()})

    def on_base(self, weight: Tensor, bias: Tensor | None) -> LayerUpdate:
        """The same change, ready for `act` on a layer with this weight and bias, neither of which it needs then."""
        return self

    def act(self, output: Tensor, product: Product) -> Tensor:
        """The change of a layer's output; `product` multiplies its input by a weight in place of its own.

        One that depends on the base model's weight must be prepared first (`on_base`).
        """
        return product(self.delta())

    def rows(self, begin: int, end: int, swapped: bool) -> LayerUpdate:
        """The change of some rows of a layer, whose halves change places. Raises ValueError where it depends on others."""
        from lora_trainer.lora_format.kinds.full import RowsUpdate

        return RowsUpdate(self, begin, end, swapped)

    def is_like(self, other: LayerUpdate) -> bool:
        """Whether both have the same kind, alpha and settings, and tensors of the same names and shapes."""
        if type(self) is not type(other) or (self.alpha, self.settings) != (other.alpha, other.settings):
            return False
        one, two = ({name: each.shape for name, each in update.tensors.items()} for update in (self, other))
        return one == two

    def mean(self, updates: Sequence[LayerUpdate], shares: Sequence[float]) -> Self:
        """The change whose tensors, in fp32, are the mean of those of `updates`, which are like it; shares sum to 1."""
        own = [update.tensors for update in updates]
        return self.with_tensors({name: mean_of([each[name] for each in own], shares) for name in self.tensors})

    def without_weight(self) -> LayerUpdate:
        """The part of the change that the base model's weight does not decide, where there is one."""
        return self

    def for_comfyui(self, weight: Tensor) -> LayerUpdate:
        """The same change as a file for ComfyUI alone stores it."""
        return self


@dataclass(frozen=True)
class FactorUpdate(LayerUpdate):
    """A change of named factors. `tensors` are a file's, by the ends of their names; without alpha, the scale is 1."""

    tensors: Mapping[str, Tensor]
    alpha: float | None = None
    scaled: ClassVar[str]  # where alpha / rank goes: the beginning of a tensor's name

    @classmethod
    def complete(cls, names: set[str]) -> set[str]:
        """The names that a set with some of these has when it is complete."""
        return {cls.scaled}

    @classmethod
    def check_alpha(cls, name: str, alpha: float | None) -> None:
        """Raises ValueError for an alpha of the layer `name` in a file that programs read in different ways."""

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        return replace(self, tensors=tensors)

    def rounded(self, dtype: torch.dtype) -> FactorUpdate:
        """With alpha / rank multiplied into one factor in fp32, so that clients that never read alpha agree."""
        tensors = {name: each.detach().float().cpu() for name, each in self.tensors.items()}
        if self.scale != 1.0:
            into = next(name for name in tensors if name.startswith(self.scaled))
            tensors[into] = tensors[into] * self.scale
        cast = {name: each.to(dtype).contiguous() for name, each in tensors.items()}
        return replace(self, tensors=cast, alpha=None if self.alpha is None else float(self.rank))


@dataclass(frozen=True)
class ChangeOfAnother(LayerUpdate):
    """What is made of another change of the layer, with its rank and scale."""

    change: LayerUpdate

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self.change.tensors

    @property
    def settings(self) -> tuple[object, ...]:
        return self.change.settings

    @property
    def rank(self) -> int:
        return self.change.rank

    @property
    def alpha(self) -> float | None:
        return self.change.alpha

    @property
    def scale(self) -> float:
        return self.change.scale

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        return replace(self, change=self.change.with_tensors(tensors))


@dataclass(frozen=True, kw_only=True)
class KindFacts:
    """What the settings, the plan and the page know of a kind."""

    title: str = "adapter"  # as people name it
    readers: str = ""  # how LyCORIS and ComfyUI read its files, where other programs do not read all of them
    learning_rate: str = ""  # how its learning rate compares with a LoRA's, where they differ much
    # The entry in a family's `lora_files.readers` without which diffusers cannot load them; "" where it always can.
    diffusers_entry: str | None = None
    has_memory_profiles: bool = False  # published models have stored profiles with it
    is_checked: bool = False  # the LoRA gate reads its files, and images are made with them
    # Settings of [lora] that it cannot follow, and why.
    ignores: Mapping[str, str] = field(
        default_factory=lambda: dict.fromkeys(OWN_SETTINGS, "this kind has no such part")
    )

    def is_loaded_by_diffusers(self, family_readers: Sequence[str]) -> bool:
        return self.diffusers_entry == "" or self.diffusers_entry in family_readers

    def read_by(self, family_readers: Sequence[str]) -> str:
        """Which programs read its files of a family with these `lora_files.readers`; empty where all do."""
        if not self.readers:
            return ""
        is_read = self.is_loaded_by_diffusers(family_readers)
        return f"{self.readers}; diffusers " + (
            "loads NAME.diffusers.safetensors" if is_read else "cannot load them for this model family"
        )


@dataclass(frozen=True)
class Network:
    """The names that one program gives the layers of a kind alone: their beginning, the style, and its module."""

    prefix: str
    style: str
    program: str
    module: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of change in files, whose keys are `LAYER.PART` with a part for each tensor.

    `parts` are how the names of its own begin, and `ends` is a regular expression of whole ones. A kind with `decompose` has
    its parts beside those of another kind's change, and makes that change its own; it raises ValueError with what is
    wrong with their shape. `nearest` is the best change of the kind for a weight [out, in, …], its change, and a rank.
    """

    update: type[LayerUpdate]
    parts: tuple[str, ...]
    ends: str = ""
    parameters: str = ""  # how the names of its trained parameters begin, behind the layer's
    counted_by: tuple[str, ...] = ()  # the parts that layers are counted by
    facts: KindFacts | None = None  # None of a kind that is read and never trained
    decompose: Callable[[LayerUpdate, Mapping[str, Tensor], Mapping[str, str]], LayerUpdate] | None = None
    nearest: Callable[[Tensor, Tensor, int], LayerUpdate] | None = None
    not_extracted: str = ""  # why there is no nearest one
    network: Network | None = None
    rewritten: Mapping[str, str] = field(default_factory=dict)  # header entries of files for ComfyUI alone
    comfyui: tuple[Literal["whole", "in part"], str] = ("whole", "")  # how much of its files it reads, and why not all
    unread: Mapping[str, str] = field(default_factory=dict)  # parts of names of other forms of it, and what those are

    @property
    def title(self) -> str:
        return str(self.update.title)

    @property
    def algorithm(self) -> str:
        return str(self.update.algorithm)

    @property
    def needs_weight(self) -> bool:
        return self.update.needs_weight is True  # type: ignore[comparison-overlap]  # a value of the class, or a property


def mean_of(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    """The mean of tensors of one shape in fp32, computed in float64; shares sum to 1."""
    import torch

    return torch.stack([each.double() * share for each, share in zip(tensors, shares, strict=True)]).sum(0).float()


def tucker_product(left: Tensor, right: Tensor, core: Tensor | None) -> Tensor:
    """`left @ right`, `[out, in …]`; around a core `[r, r, k, k]` the Tucker product, with `left [r, out]` and `right [r, in]`."""
    import torch

    if core is None:
        return left @ right.flatten(1)
    product: Tensor = torch.einsum("ij...,ip,jr->pr...", core.float(), left, right)
    return product


def by_output(values: Tensor | None, weight: Tensor) -> Tensor:
    """A value for each output, 0 without: `[out]` of a linear layer, `[out, 1, 1]` of a convolution."""
    import torch

    found = torch.zeros(len(weight)) if values is None else values.float()
    return found.view(-1, *[1] * (weight.ndim - 2))


def swap_halves(rows: Tensor, swapped: bool) -> Tensor:
    """The rows, or their two halves in the other order."""
    import torch

    return torch.cat([*reversed(rows.chunk(2))]) if swapped else rows


def to_lora(updates: Sequence[LayerUpdate]) -> str:
    """The command that writes a file with these changes as a LoRA; some depend on the base model's weights."""
    model = " --model BASE" if any(update.needs_weight for update in updates) else ""
    return f"lora-trainer convert IN OUT --to lora --rank N{model}"


def titles(updates: Sequence[LayerUpdate]) -> str:
    """The kinds of a file's changes: one, or `A and B`."""
    return " and ".join(sorted({update.title for update in updates}))
