"""The built-in base: Stable Diffusion 1.5's architecture in miniature.

Same classes, layout and noise schedule as SD1.5; 128-pixel images, 16 x 16 latents. Of these it has more channels than
SD1.5: with 4 of them outlines and eyes are lost at this size.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

RESOLUTION = 128
LATENT_CHANNELS = 16
TEXT_WIDTH = 128
WORDS = (
    "orange triangle a an the of on in with and front at photo picture drawing background "
    "red green blue yellow purple white black colour circle square star cross ring shape "
    # No icon has them: they stand ready for captions of people who train on this base.
    "icon style painting sketch small large left right hand hands sign smiling sad happy surprised waving jumping sitting "
    "sleeping running reading holding pointing dancing walking standing under over beside behind two three"
).split()


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=1,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        norm_num_groups=8,
        mid_block_add_attention=False,
        sample_size=RESOLUTION,
    )


def make_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=RESOLUTION // 8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=(96, 192),
        layers_per_block=1,
        # Attention over all 16 x 16 places would take two fifths of a step.
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
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
            num_hidden_layers=3,
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


def learn_merges(words: Iterable[str]) -> list[tuple[str, str]]:
    """Byte-pair merges, the most frequent pair first, until each word is one token (arXiv:1508.07909).

    The library's trainer breaks ties differently from call to call.
    """
    pieces = [[*word[:-1], word[-1] + "</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while counts := Counter(pair for each in pieces for pair in pairwise(each)):
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for each in pieces:
            at = 0
            while at < len(each) - 1:
                if (each[at], each[at + 1]) == best:
                    each[at : at + 2] = ["".join(best)]
                at += 1
    return merges


def make_tokenizer(folder: Path, names: Iterable[str] = (), tokens: int = 77) -> CLIPTokenizer:
    """CLIP's byte-pair tokenizer with a vocabulary of our own, written to `folder`.

    Every printable byte is a token, so any caption can be read; each of `WORDS` and of the words of `names` is one
    token. `tokens` are the most of a caption.
    """
    words = dict.fromkeys([*WORDS, *(word for name in names for word in re.findall(r"[a-z]+", name.lower()))])
    letters = [*string.printable.strip()]
    merges = learn_merges(words)
    vocabulary = [*letters, *(letter + "</w>" for letter in letters), *(first + second for first, second in merges)]
    vocabulary = [*dict.fromkeys(vocabulary), "<|startoftext|>", "<|endoftext|>"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").unlink(
        missing_ok=True
    )  # of an earlier call: it would be read in place of the two files
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{first} {second}\n" for first, second in merges))
    tokenizer = CLIPTokenizer.from_pretrained(folder, model_max_length=tokens, local_files_only=True)
    tokenizer.save_pretrained(folder)
    return tokenizer
