"""Learned tokens: unchanged embeddings, tokens in captions, and files that other programs read alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.config.schema.inputs import TextualInversionSection
from lora_trainer.core.errors import UsageError
from lora_trainer.lora_format.weights import LoraWeights
from lora_trainer.lora_format.writing import write_learned_tokens
from lora_trainer.models.drawing import texts_of
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.family import PLAIN, TextParts
from lora_trainer.models.textual_inversion import add_learned_tokens, from_embeddings, initial_embeddings, to_embeddings
from lora_trainer.models.weighting import read_tokens
from tests.lora_format.tiny import tiny_pipeline

CPU = torch.device("cpu")
WORD = "<zobo>"


@pytest.fixture(scope="module", params=["sd15", "sdxl", "sd3", "flux"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp(request.param)
    tiny_pipeline(root / "tokens", request.param).save_pretrained(root / request.param, safe_serialization=True)
    return root / request.param


def texts(folder: Path) -> TextParts:
    return FAMILIES[folder.name].text.load(folder, torch.float32, CPU)


def components(folder: Path) -> tuple[str, ...]:
    return FAMILIES[folder.name].text.clips


@torch.no_grad()
def encode(folder: Path, parts: TextParts, *captions: str) -> dict[str, Tensor]:
    return FAMILIES[folder.name].text.encode(parts, captions, PLAIN)


def clip_embeds(folder: Path, cond: dict[str, Tensor]) -> list[Tensor]:
    """The embeddings without T5, which has no learned tokens."""
    if folder.name == "flux":
        return [cond["pooled"]]
    return [cond["embeds"][:, :77], *([cond["pooled"]] if "pooled" in cond else [])]


def random_words(folder: Path, parts: TextParts, vectors: int = 3) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return {
        WORD: {
            name: torch.randn(vectors, parts.encoders[name].config.hidden_size, generator=draw)
            for name in components(folder)
        }
    }


def test_captions_without_the_token_are_encoded_unchanged(folder: Path) -> None:
    parts = texts(folder)
    before = encode(folder, parts, "a red ring", "")
    tables = [parts.encoders[name].get_input_embeddings().weight.clone() for name in components(folder)]
    add_learned_tokens(parts, random_words(folder, parts))
    after = encode(folder, parts, "a red ring", "")
    assert all(torch.equal(after[name], before[name]) for name in before)
    for name, table in zip(components(folder), tables, strict=True):
        assert torch.equal(parts.encoders[name].get_input_embeddings().known.weight, table)


def test_a_token_initialized_like_others_is_encoded_like_them(folder: Path) -> None:
    """`<zobo>` with the embeddings of `red ring` encodes like `red ring`, also in the pooled embedding."""
    parts = texts(folder)
    count = len(parts.tokenizers["text_encoder"]("red ring", add_special_tokens=False).input_ids)
    wanted = encode(folder, parts, "a red ring beside a ring")
    text = TextualInversionSection(placeholder_tokens=(WORD,), num_vectors=count, initializer_token="red ring")
    add_learned_tokens(parts, initial_embeddings(parts, components(folder), text))
    found = encode(folder, parts, f"a {WORD} beside a ring")
    assert clip_embeds(folder, wanted)
    for one, other in zip(clip_embeds(folder, found), clip_embeds(folder, wanted), strict=True):
        torch.testing.assert_close(one, other)


def test_a_token_is_not_split_between_two_chunks(folder: Path) -> None:
    """As in A1111, and in ComfyUI for tokens of fewer than 8 vectors. The last chunk is truncated."""
    parts = texts(folder)
    add_learned_tokens(parts, random_words(folder, parts))
    tokenizer = parts.tokenizers["text_encoder"]
    few, word = tokenizer("a " * 73, add_special_tokens=False).input_ids, tokenizer.convert_tokens_to_ids(WORD)
    own, a, end = [word, word + 1, word + 2], few[0], tokenizer.eos_token_id
    for caption in ("a " * 73 + f"{WORD} a", (("a " * 73, 1.0), (f"{WORD} ", 1.2), ("a", 1.0))):
        long, short = (read_tokens(tokenizer, [caption], CPU, pieces).ids.tolist() for pieces in (2, 1))
        assert long[0][1:76] == [*few, end, tokenizer.pad_token_id]
        assert long[1][1:6] == [*own, a, end]
        assert short[0][1:77] == [*few, *own[:2], end]
    fits = read_tokens(tokenizer, ["a " * 72 + f"{WORD} a"], CPU, 2).ids.tolist()
    assert (fits[0][1:77], fits[1][1:3]) == ([*few[1:], *own, end], [a, end])


def test_tokens_start_from_the_mean_without_an_initializer(folder: Path) -> None:
    parts = texts(folder)
    started = initial_embeddings(
        parts, components(folder), TextualInversionSection(placeholder_tokens=(WORD, "zub"), num_vectors=2)
    )
    for name in components(folder):
        mean = parts.encoders[name].get_input_embeddings().weight.mean(dim=0)
        assert started["zub"][name].shape == (2, len(mean))
        torch.testing.assert_close(started["zub"][name][1], mean)


def test_only_the_learned_tokens_get_gradients(folder: Path) -> None:
    parts = texts(folder)
    own = add_learned_tokens(parts, random_words(folder, parts))
    for parameter in own.values():
        parameter.requires_grad_(True)
    cond = FAMILIES[folder.name].text.encode(parts, ["a ring", f"a {WORD} ring"], PLAIN)
    # A plain sum of what a layer norm returns has no gradient.
    sum((value * torch.linspace(-1, 1, value.shape[-1])).sum() for value in cond.values()).backward()  # type: ignore[union-attr]
    trained = [each for encoder in parts.encoders.values() for each in encoder.parameters() if each.grad is not None]
    assert {id(each) for each in trained} == {id(each) for each in own.values()}
    for parameter in own.values():
        assert parameter.grad is not None
        assert bool(parameter.grad.abs().sum(dim=-1).all())


def test_learned_tokens_are_written_and_read_back(folder: Path, tmp_path: Path) -> None:
    parts = texts(folder)
    words = random_words(folder, parts) | {"zub": random_words(folder, parts)[WORD]}
    own = {name: parameter.detach() for name, parameter in add_learned_tokens(parts, words).items()}
    embeddings = to_embeddings(own, components(folder), (WORD, "zub"))
    back = from_embeddings(embeddings, components(folder))
    assert all(torch.equal(back[word][name], words[word][name]) for word in words for name in words[word])
    paths = write_learned_tokens(tmp_path, "cat", LoraWeights({}, embeddings=embeddings))
    assert [path.name for path in paths] == ["cat.embedding-zobo.safetensors", "cat.embedding-zub.safetensors"]
    names = ["emb_params"] if folder.name in ("sd15", "flux") else ["clip_g", "clip_l"]
    assert sorted(load_file(paths[0])) == names


def test_diffusers_reads_the_token_file_as_we_do(folder: Path, tmp_path: Path) -> None:
    family = FAMILIES[folder.name]
    if folder.name == "sd3":
        pytest.skip("diffusers loads no embeddings for SD3")
    ours, theirs = (family.pipeline.make(folder, torch.float32, CPU) for _ in range(2))
    words = random_words(folder, texts_of(ours))
    own = {name: parameter.detach() for name, parameter in add_learned_tokens(texts_of(ours), words).items()}
    embeddings = to_embeddings(own, components(folder), (WORD,))
    (path,) = write_learned_tokens(tmp_path, "cat", LoraWeights({}, embeddings=embeddings), dtype=torch.float32)
    if folder.name != "sdxl":
        theirs.load_textual_inversion(str(path.parent), weight_name=path.name, token=WORD, local_files_only=True)
    else:
        for key, number in (("clip_l", ""), ("clip_g", "_2")):
            encoder, tokenizer = (getattr(theirs, f"{part}{number}") for part in ("text_encoder", "tokenizer"))
            theirs.load_textual_inversion(
                {WORD: load_file(path)[key]}, token=WORD, text_encoder=encoder, tokenizer=tokenizer
            )
    found, prompt = encode(folder, texts_of(ours), f"a {WORD} ring"), f"a {WORD} ring"
    if folder.name == "flux":
        torch.testing.assert_close(found["pooled"], theirs.encode_prompt(prompt, prompt, device=CPU)[1])
        return
    wanted: Any = theirs.encode_prompt(prompt, device=CPU, num_images_per_prompt=1, do_classifier_free_guidance=False)
    torch.testing.assert_close(found["embeds"], wanted[0])
    if "pooled" in found:
        torch.testing.assert_close(found["pooled"], wanted[2])


def test_existing_tokens_are_refused(folder: Path) -> None:
    parts = texts(folder)
    known = parts.tokenizers["text_encoder"].convert_ids_to_tokens(0)
    with pytest.raises(UsageError, match="already"):
        add_learned_tokens(parts, {known: random_words(folder, parts)[WORD]})
    narrow = {WORD: {name: torch.zeros(2, 7) for name in components(folder)}}
    with pytest.raises(UsageError, match="7 wide"):
        add_learned_tokens(texts(folder), narrow)
    with pytest.raises(UsageError, match="of its kind"):
        from_embeddings({f"{WORD}.clip_h": torch.zeros(2, 8)}, components(folder))
