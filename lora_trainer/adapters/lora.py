"""LoRA: injected with peft, its parameters by name, its updates as low-rank pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Conv2d, Linear
from torch import Tensor, nn

from lora_trainer.adapters.base import AS_USUAL, AdapterKind, AdapterOptions
from lora_trainer.adapters.injection import ADAPTER, by_module, inject, patterns, put, too_high
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.weights import module_name
from lora_trainer.lora_format.writing import lora_forms
from lora_trainer.models.quantization.store import COMPUTED_IN, wide_weight

if TYPE_CHECKING:
    from lora_trainer.adapters.timestep_rank import TimestepRank
    from lora_trainer.core.errors import Problem
    from lora_trainer.lora_format.layer_updates import LayerUpdate

INITIAL_DOWN, INITIAL_UP = "initial_down", "initial_up"  # buffers, and the ends of their names in checkpoints
OVERSAMPLED = 8  # columns of a randomized SVD beyond the rank


def inject_lora(
    denoiser: nn.Module, modules: Sequence[str], options: AdapterOptions, seed: int
) -> dict[str, nn.Parameter]:
    """Put a LoRA on the modules, in place; return its trainable parameters by name.

    The update is scaled by alpha / rank, or by alpha / sqrt(rank) (arXiv:2312.03732). Down projections are initialized
    as in peft (Kaiming uniform) from `seed`, up projections with 0; or as `options.initialization` says, convolutions
    excepted but for `gaussian`.
    """
    layers = {name: options.of_layer(name) for name in modules}
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(modules),
        use_rslora=options.rank_stabilized,
        init_lora_weights="gaussian" if options.initialization == "gaussian" else True,
        rank_pattern=patterns({name: own.rank for name, own in layers.items()}, options.rank),
        alpha_pattern=patterns({name: own.alpha for name, own in layers.items()}, options.alpha),
    )

    def start() -> None:
        for name, own in layers.items():
            layer: Any = denoiser.get_submodule(name)
            if own.dropout != options.dropout:
                layer.lora_dropout[ADAPTER] = nn.Dropout(own.dropout) if own.dropout else nn.Identity()
            if isinstance(layer, Linear) and options.initialization not in (AS_USUAL, "gaussian"):
                initialize(layer, options.initialization)

    return inject(config, denoiser, seed, start)


@torch.no_grad()
def initialize(layer: Linear, name: str) -> None:
    """Start a linear layer's LoRA by its weight W: `svd_down`, `pissa`, `pissa_niter_4`, `olora`.

    `svd_down` starts the down projection with W's first right singular vectors, as large as it usually starts, and up
    with 0. The others (arXiv:2404.02948; arXiv:2406.01775) train a part `up0 @ down0` of W itself.
    Here that part stays in W, and what is trained is how far up and down move away from up0 and down0, from 0 on: the
    gradients are the same, the base is never changed or rounded, and the first prediction is the base's to the bit.
    """
    down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    rank, is_traced = down.shape[0], down.is_meta
    weight = down.new_zeros(len(up), down.shape[1]) if is_traced else wide_weight(layer.get_base_layer())
    if name == "svd_down":
        if not is_traced:
            vectors = leading_vectors(weight, rank, None)[2] / math.sqrt(3.0)  # the norm of a usual row
            down[: len(vectors)].copy_(vectors)
        return
    initial_up, initial_down = up.new_zeros(up.shape), down.new_zeros(down.shape)
    if not is_traced:
        found_up, found_down = initial_factors(weight, rank, layer.scaling[ADAPTER], name)
        initial_up[:, : found_up.shape[1]].copy_(found_up)
        initial_down[: len(found_down)].copy_(found_down)
    dtype = getattr(layer.get_base_layer(), COMPUTED_IN, None) or layer.get_base_layer().weight.dtype
    layer.register_buffer(INITIAL_DOWN, initial_down.to(dtype), persistent=False)
    layer.register_buffer(INITIAL_UP, initial_up.to(dtype), persistent=False)
    down.zero_()
    up.zero_()
    layer.__class__ = MovedLinear


def initial_factors(weight: Tensor, rank: int, scale: float, name: str) -> tuple[Tensor, Tensor]:
    """up0 [out, rank] and down0 [rank, in] of a weight W [out, in], as `initialize` names them.

    OLoRA's are the first columns of Q and rows of R of W = QR. `scale` times the product of PiSSA's is the best
    approximation of W of this rank.
    """
    if name == "olora":
        q, r = torch.linalg.qr(weight)
        return q[:, :rank], r[:rank]
    iterations = int(name.rpartition("_")[2]) if "niter" in name else None
    left, sizes, right = leading_vectors(weight, rank, iterations)
    root = (sizes / scale).sqrt()
    return left * root, root[:, None] * right


def leading_vectors(weight: Tensor, rank: int, iterations: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular values [rank] of W [out, in], with U [out, rank] and V^T [rank, in].

    Exact, or with so many power iterations of a random subspace (arXiv:0909.4061, algorithm 5.1), which is faster. The
    random numbers are drawn on the CPU, so they are the same on each device.
    """
    if iterations is None:
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        return left[:, :rank], sizes[:rank], right[:rank]
    columns = min(rank + OVERSAMPLED, *weight.shape)
    space = torch.linalg.qr(weight @ torch.randn(weight.shape[1], columns).to(weight))[0]
    for _ in range(iterations):
        space = torch.linalg.qr(weight @ torch.linalg.qr(weight.T @ space)[0])[0]
    left, sizes, right = torch.linalg.svd(space.T @ weight, full_matrices=False)
    return (space @ left)[:, :rank], sizes[:rank], right[:rank]


class SummedLinear(Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer with exactly one adapter; peft handles all other cases.

    peft multiplies the update by its scale and adds it in two operations, each of which reads and writes [M, out].
    Here one matmul adds onto the base layer's output: base [M, out] + scale * small [M, rank] up [out, rank]^T
    (arXiv:2106.09685, section 4.1).
    """

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        is_plain = not (arguments or named or self.merged or self.disable_adapters or self.lora_variant)
        if not is_plain or self.active_adapters != [ADAPTER] or not isinstance(self.lora_dropout[ADAPTER], nn.Identity):
            return super().forward(x, *arguments, **named)  # type: ignore[no-any-return]
        down, up, scale = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight, self.scaling[ADAPTER]
        base = self.base_layer(x)
        small = nn.functional.linear(x.to(down.dtype), down).flatten(0, -2)
        summed = torch.addmm(base.flatten(0, -2), small.to(base.dtype), up.to(base.dtype).t(), alpha=scale)
        return summed.view(base.shape)


class MovedLinear(Linear):  # type: ignore[misc]  # peft is untyped
    """A linear layer whose LoRA moves a part up0 @ down0 of its weight: (up0 + up) @ (down0 + down) - up0 @ down0.

    That is up0 @ down + up @ (down0 + down), which is 0 while up and down are 0. Its output is
    base [M, out] + scale * (moved up0^T + whole up^T), with moved = x down^T and whole = moved + x down0^T, both [M, rank].
    """

    def forward(self, x: Tensor, *arguments: object, **named: object) -> Tensor:
        base: Tensor = self.base_layer(x, *arguments, **named)
        if self.disable_adapters:
            return base
        dropped = self.lora_dropout[ADAPTER](x.to(self.initial_down.dtype))
        moved = self.lora_A[ADAPTER](dropped)
        whole = moved + nn.functional.linear(dropped, self.initial_down)
        change = nn.functional.linear(moved, self.initial_up) + self.lora_B[ADAPTER](whole)
        summed: Tensor = base + (self.scaling[ADAPTER] * change).to(base.dtype)
        return summed


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parts of weights that `MovedLinear` moves, by name."""
    return {
        f"{name}.{half}": layer.get_buffer(half)
        for name, layer in model.named_modules()
        if isinstance(layer, MovedLinear)
        for half in (INITIAL_DOWN, INITIAL_UP)
    }


def limit_ranks(denoiser: nn.Module, limit: TimestepRank) -> None:
    """Train fewer rows of the denoiser's LoRA at high noise, in the passes that `limit` limits."""
    for module in denoiser.modules():
        if isinstance(module, Linear | Conv2d):
            limit.watch(module.lora_A[ADAPTER])
        if type(module) is SummedLinear:
            module.__class__ = Linear  # which calls the down projection


def sum_updates(denoiser: nn.Module) -> None:
    """Make the adapted linear layers add their update in one matmul. A layer changes its class, not its identity."""
    for module in denoiser.modules():
        if type(module) is Linear:
            module.__class__ = SummedLinear


def updates(trained: Mapping[str, Tensor], component: str, options: AdapterOptions) -> Mapping[str, LayerUpdate]:
    """Low-rank updates, with the alpha whose alpha / rank is the scale in training.

    Where a part of the weight was moved (`MovedLinear`) they have twice the rank: [up0, up] @ [down; down0 + down].
    """
    found: dict[str, LayerUpdate] = {}
    for module, names in by_module(trained, "lora_").items():
        down, up = (trained[names[f"lora_{half}.{ADAPTER}.weight"]] for half in "AB")
        alpha = options.of_layer(module).file_alpha
        if (initial_down := trained.get(f"{module}.{INITIAL_DOWN}")) is not None:
            initial_up = trained[f"{module}.{INITIAL_UP}"].to(up)
            down, up = torch.cat([down, down + initial_down.to(down)]), torch.cat([initial_up, up], dim=1)
            alpha *= 2
        found[module_name(component, module)] = LoraPair(down, up, alpha)
    return found


def start_from(
    parameters: Mapping[str, nn.Parameter], updates: Mapping[str, LayerUpdate], options: AdapterOptions
) -> list[Problem]:
    """Put low-rank updates into a LoRA of the same rank or a higher one, whose other rows keep their initial values.

    The ratio of the two scales goes into the up projections, so the change of each layer is the same. Nothing is changed
    where a rank of the file is above that of its layer.
    """
    pairs = {module: update for module, update in updates.items() if isinstance(update, LoraPair)}
    if problems := too_high({module: pair.rank for module, pair in pairs.items()}, options):
        return problems
    for module, pair in pairs.items():
        own = options.of_layer(module)
        scale = own.alpha / (math.sqrt(own.rank) if own.rank_stabilized else own.rank)
        down, up = (parameters[f"{module}.lora_{half}.{ADAPTER}.weight"] for half in "AB")
        put(down, torch.cat([pair.down.float().to(down.device), down.detach()[pair.rank :].float()]))
        theirs = pair.up.float() * (pair.scale / scale)
        put(up, torch.cat([theirs.to(up.device), up.detach()[:, pair.rank :].float()], dim=1))
    return []


def is_up(name: str) -> bool:
    """Whether a parameter is of an up projection."""
    return ".lora_B." in name


KIND = AdapterKind(
    inject=inject_lora,
    updates=updates,
    forms=lora_forms,
    speed_up=sum_updates,
    fixed=fixed_tensors,
    is_up=is_up,
    limit_ranks=limit_ranks,
    start_from=start_from,
)
