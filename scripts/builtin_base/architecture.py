"""The built-in base: Stable Diffusion 1.5's architecture in miniature.

Same classes, layout and noise schedule as SD1.5; 128-pixel images, 4 x 16 x 16
latents.  About 5.7 M parameters, so that it travels inside the package.
"""

from __future__ import annotations

import json
import string
from pathlib import Path

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

RESOLUTION = 128
TEXT_WIDTH = 64
# The first two contain others ("an", "ring"): their merges must come first.
WORDS = (
    "orange triangle a an the of on in with and front at photo picture drawing background "
    "red green blue yellow purple white black colour circle square star cross ring shape"
).split()


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(16, 32, 64, 96),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        sample_size=RESOLUTION,
    )


def make_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=RESOLUTION // 8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(64, 120),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=4,
        norm_num_groups=8,
    )


def make_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=77,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_scheduler() -> DDIMScheduler:
    """SD1.5's noise schedule, predicting epsilon."""
    return DDIMScheduler(
        num_train_timesteps=1000,
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type="epsilon",
    )


def make_tokenizer(folder: Path) -> CLIPTokenizer:
    """CLIP's byte-pair tokenizer with a vocabulary of our own, written to `folder`.

    Every printable byte is a token, so any caption can be read; each of `WORDS` is
    one token, reached by merging its letters from the left.
    """
    letters = [*string.printable.strip()]
    vocabulary = [*letters, *(letter + "</w>" for letter in letters)]
    merges: list[str] = []
    for word in WORDS:
        pieces = [*word[:-1], word[-1] + "</w>"]
        while len(pieces) > 1:
            merge, joined = f"{pieces[0]} {pieces[1]}", pieces[0] + pieces[1]
            if merge not in merges:
                merges.append(merge)
            if joined not in vocabulary:
                vocabulary.append(joined)
            pieces[:2] = [joined]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=77, local_files_only=True)
    tokenizer.save_pretrained(folder)
    return tokenizer
