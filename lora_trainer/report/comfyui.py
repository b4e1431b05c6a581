"""A ComfyUI workflow of a sample image: the same prompt, seed, steps, guidance scale, size and strength. No torch.

It is in ComfyUI's API format, which its page opens too. ComfyUI draws the noise of a seed in another way, so its image has the same
quality and another composition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lora_trainer.core.families import families

# diffusers' schedulers and what ComfyUI's KSampler calls them: sampler and schedule.
SAMPLERS = {
    "DDIMScheduler": ("ddim", "ddim_uniform"),
    "DPMSolverMultistepScheduler": ("dpmpp_2m", "normal"),
    "EulerAncestralDiscreteScheduler": ("euler_ancestral", "normal"),
    "EulerDiscreteScheduler": ("euler", "normal"),
    "FlowMatchEulerDiscreteScheduler": ("euler", "simple"),
    "UniPCMultistepScheduler": ("uni_pc", "normal"),
}
USUAL = ("euler", "normal")
NO_GUIDANCE = 1.0
Node = dict[str, Any]
Output = list[Any]  # the key of a node, and the number of one of its outputs


class Workflow(dict[str, Node]):
    """Nodes by key, as the API format has them."""

    def add(self, class_type: str, title: str = "", **inputs: Any) -> str:
        """Add a node and return its key."""
        key = str(len(self) + 1)
        self[key] = {"class_type": class_type, "inputs": inputs, "_meta": {"title": title or class_type}}
        return key


def workflow_of(recipe: Mapping[str, Any], lora: str, model: str) -> dict[str, Node] | None:
    """The workflow of a recipe's first image with the LoRA. None for a family whose nodes are not known.

    `lora` and `model` are file names as ComfyUI lists them.
    """
    loaders = families().get(recipe["family"], {}).get("comfyui")
    if loaders is None:
        return None
    workflow = Workflow()
    loaded_model, loaded_clip, vae = _load(workflow, loaders, model)
    strength = next((strength for strength in recipe["strengths"] if strength), 1.0)
    strengths = {"strength_model": strength, "strength_clip": strength}
    with_lora = workflow.add("LoraLoader", lora, model=loaded_model, clip=loaded_clip, lora_name=lora, **strengths)
    sampled = _sampling(workflow, loaders, recipe, [with_lora, 0])
    clip: Output = [with_lora, 1]
    skip = recipe["text"].get("clip_skip")
    if skip is not None:
        clip = [workflow.add("CLIPSetLastLayer", clip=clip, stop_at_clip_layer=-skip), 0]
    image, guidance = recipe["images"][0], recipe["guidance"] or NO_GUIDANCE
    # Images are drawn of plain prompts; ComfyUI would read `(toy)` as a weight.
    prompt, unwanted = (re.sub(r"[()]", r"\\\g<0>", text or "") for text in (image["prompt"], recipe["negative"]))
    positive: Output = [workflow.add("CLIPTextEncode", "Prompt", text=prompt, clip=clip), 0]
    negative = workflow.add("CLIPTextEncode", "Negative prompt", text=unwanted, clip=clip)
    if node := loaders.get("guidance"):  # the guidance scale is an input of the model
        positive = [workflow.add(node, conditioning=positive, guidance=guidance), 0]
        guidance = NO_GUIDANCE
    width, height = recipe["size"]
    latent = workflow.add(loaders["latent"], width=width, height=height, batch_size=1)
    sampler, schedule = SAMPLERS.get(recipe["scheduler"], USUAL)
    drawn = workflow.add(
        "KSampler",
        model=sampled,
        positive=positive,
        negative=[negative, 0],
        latent_image=[latent, 0],
        seed=image["seed"],
        steps=recipe["steps"],
        cfg=guidance,
        sampler_name=sampler,
        scheduler=schedule,
        denoise=1.0,
    )
    decoded = workflow.add("VAEDecode", samples=[drawn, 0], vae=vae)
    workflow.add("SaveImage", images=[decoded, 0], filename_prefix=lora.removesuffix(".safetensors"))
    return workflow


def _load(workflow: Workflow, loaders: Mapping[str, Any], model: str) -> tuple[Output, Output, Output]:
    """Add the nodes that load model, text encoders and VAE, and return their outputs."""
    if "vae" in loaders:
        unet = workflow.add("UNETLoader", "Base model", unet_name=model, weight_dtype="default")
        loaded_model: Output = [unet, 0]
        vae: Output = [workflow.add("VAELoader", vae_name=loaders["vae"]), 0]
        clip: Output = []
    else:
        checkpoint = workflow.add("CheckpointLoaderSimple", "Base model", ckpt_name=model)
        loaded_model, clip, vae = [checkpoint, 0], [checkpoint, 1], [checkpoint, 2]
    if encoders := loaders.get("text_encoders"):
        clip = [workflow.add(encoders["class_type"], "Text encoders", **encoders["inputs"]), 0]
    return loaded_model, clip, vae


def _sampling(workflow: Workflow, loaders: Mapping[str, Any], recipe: Mapping[str, Any], model: Output) -> Output:
    """Add what the model's timesteps need: a flow's shift, or the velocity of a V-Pred model."""
    config = recipe["scheduler_config"]
    node, shift = loaders.get("shift"), config.get("shift")
    if node and isinstance(shift, int | float):
        return [workflow.add(node, model=model, shift=float(shift)), 0]
    if config.get("prediction_type") == "v_prediction":
        zero = bool(recipe.get("zero_terminal_snr") or config.get("rescale_betas_zero_snr"))
        return [workflow.add("ModelSamplingDiscrete", model=model, sampling="v_prediction", zsnr=zero), 0]
    return model
