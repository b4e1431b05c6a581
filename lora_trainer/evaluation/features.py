"""What the frozen base model sees in latents: features to compare images by, without another encoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from lora_trainer.diffusion.noise import position_noise

if TYPE_CHECKING:
    from lora_trainer.diffusion.process import Process
    from lora_trainer.evaluation.validation_loss import Predict
    from lora_trainer.models.family import FeatureBlock

# Share of the timesteps. A denoiser's inner states describe an image best with some noise in it (arXiv:2306.03881).
NOISE_LEVEL = 0.15
LATENTS, LATENT_GRID = (
    "latents",
    4,
)  # the latents themselves are a block too, as means of a grid of so many cells a side


@contextmanager
def listening(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """The latest output of each module, by name, inside the block."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A block of a transformer returns its text and its image tokens; the image's are the longer list, or the last.
            tensors = [output] if isinstance(output, Tensor) else [each for each in output if isinstance(each, Tensor)]
            found[name] = tensors[-1]

        return hook

    handles = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def image_features(
    predict: Predict,
    process: Process,
    images: Sequence[tuple[Tensor, Tensor]],
    cond: Mapping[str, Tensor],
    blocks: Mapping[str, FeatureBlock],
) -> dict[str, Tensor]:
    """Features [N, D] of N images by block, fp32 on the CPU; an image is its latents [C, h, w] and sizes [6].

    `blocks` are the denoiser's. `cond` is that of the empty caption, [1, ...]. The noise is the same for all images of one shape.
    """
    device, dtype = next(iter(cond.values())).device, next(iter(cond.values())).dtype
    t = torch.full((1,), int(NOISE_LEVEL * process.timesteps), device=device)
    rows: dict[str, list[Tensor]] = {name: [] for name in (*blocks, LATENTS)}
    with listening({name: block.module for name, block in blocks.items()}) as outputs:
        for image, sizes in images:
            noise = position_noise(tuple(image.shape), 0, "features")[None].to(device)
            clean = image.float().to(device)[None]
            predict(process.add_noise(clean, noise, t).to(dtype), t, cond, sizes.to(device)[None])
            for name, block in blocks.items():
                states = as_image(outputs[name], image.shape[-2], image.shape[-1], block)
                rows[name].append(adaptive_avg_pool2d(states.float(), block.grid).flatten().cpu())
            rows[LATENTS].append(adaptive_avg_pool2d(clean, LATENT_GRID).flatten().cpu())
    return {name: torch.stack(each) for name, each in rows.items()}


def as_image(output: Tensor, height: int, width: int, block: FeatureBlock) -> Tensor:
    """A block's output for latents of a size as [1, C, rows, columns], without the tokens of a caption."""
    if output.ndim == 4:
        return output
    rows, columns = height // block.patch, width // block.patch
    own = slice(-rows * columns, None) if block.text_first else slice(rows * columns)
    tokens: Tensor = output[:, own].transpose(1, 2)
    image: Tensor = tokens.unflatten(2, (rows, columns))
    return image
