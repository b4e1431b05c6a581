"""Module names, diffusers keys and kohya keys convert to each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.lora_format.keys import ONE_TEXT_ENCODER, resolve
from lora_trainer.lora_format.kinds.lora import LoraPair
from lora_trainer.lora_format.kohya import kohya_pairs, plain_name
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.lora_names import names_of

BLOCK = st.sampled_from(["down_blocks", "up_blocks"])
INDEX = st.integers(0, 12).map(str)
LEAF = st.sampled_from(
    ["attn1.to_q", "attn1.to_k", "attn2.to_v", "attn2.to_out.0", "ff.net.0.proj", "ff.net.2", "attn.add_q_proj"]
)
PATHS = st.one_of(
    st.builds("unet.{}.{}.attentions.{}.transformer_blocks.{}.{}".format, BLOCK, INDEX, INDEX, INDEX, LEAF),
    st.builds("unet.mid_block.attentions.{}.transformer_blocks.{}.{}".format, INDEX, INDEX, LEAF),
    st.builds("unet.{}.{}.attentions.{}.proj_out".format, BLOCK, INDEX, INDEX),
    st.builds("unet.{}.{}.resnets.{}.conv_shortcut".format, BLOCK, INDEX, INDEX),
    st.builds("unet.{}.{}.resnets.{}.time_emb_proj".format, BLOCK, INDEX, INDEX),
    st.builds("text_encoder.text_model.encoder.layers.{}.self_attn.out_proj".format, INDEX),
    st.builds("text_encoder.text_model.encoder.layers.{}.mlp.fc1".format, INDEX),
)


def modules_of(name: str) -> tuple[str, ...]:
    """The modules of a kohya name."""
    found = resolve([name], [])[0].get(name)
    return found.modules if found else ()


@pytest.mark.parametrize("family", ["sd15", "sd2", "sdxl"])
@given(PATHS)
def test_round_trip(family: str, module: str) -> None:
    assert modules_of(plain_name(module, names_of(FAMILIES[family]))) == (module,)


def test_keys_are_those_that_other_programs_expect() -> None:
    module = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    assert (
        plain_name(module, ONE_TEXT_ENCODER) == "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    )
    text = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    assert plain_name(text, ONE_TEXT_ENCODER) == "lora_te_text_model_encoder_layers_0_self_attn_q_proj"


def test_the_size_embedding_has_the_name_that_every_program_knows() -> None:
    for layer, name in (("linear_1", "label_emb_0_0"), ("linear_2", "label_emb_0_2")):
        module = f"unet.add_embedding.{layer}"
        assert plain_name(module, ONE_TEXT_ENCODER) == f"lora_unet_{name}"
        assert modules_of(f"lora_unet_{name}") == (module,)
        assert modules_of(f"lora_unet_add_embedding_{layer}") == (module,)  # as others may write it


def test_prefixes_with_a_common_start_are_distinguished() -> None:
    """A single text encoder is `lora_te`; kohya numbers two of them."""
    assert modules_of("lora_te_text_model_final") == ("text_encoder.text_model.final",)
    assert modules_of("lora_te1_text_model_final") == ("text_encoder.text_model.final",)
    assert modules_of("lora_te2_text_model_final") == ("text_encoder_2.text_model.final",)
    assert modules_of("lora_other_x") == ()


def test_a_key_that_cannot_be_read_back_is_not_written() -> None:
    pair = LoraPair(torch.zeros(1, 2), torch.zeros(2, 1), 1.0)
    with pytest.raises(ValueError, match=r"no unambiguous kohya name for unet\.some_new\.layer"):
        kohya_pairs(LoraWeights({"unet.mid_block.attentions.0.proj_in": pair, "unet.some_new.layer": pair}))
