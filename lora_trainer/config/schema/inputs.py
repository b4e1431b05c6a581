"""What a run is made of: the model, how its text is read, captions, pictures, caches."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from lora_trainer.config.schema.types import (
    Count,
    CountOrZero,
    CropName,
    FamilyName,
    NotNegative,
    Positive,
    Section,
    Share,
    Side,
    Variant,
)


class ModelSection(Section):
    path: str | None = Field(
        None,
        description="diffusers folder, one `.safetensors` checkpoint, or a hub id such as `owner/name` or `owner/name/file.safetensors`; empty means the built-in base",
    )
    family: FamilyName | None = Field(None, description="model family; detected from the files when empty")
    revision: str | None = Field(
        None, description="branch, tag or commit of a hub id; the commit that was used is written into `config.toml`"
    )
    vae: str | None = Field(
        None,
        description="autoencoder in place of the model's own, with the same latents: a diffusers folder of it or of a whole model, one `.safetensors` file, or a hub id of either, such as `owner/name`; the commit that was used is written into `config.toml` as `owner/name@commit`",
    )
    text_encoders: str | None = Field(
        None,
        description="folder with text encoders and tokenizers that the model lacks, such as a checkpoint without them: `text_encoder_2/`, `tokenizer_2/` and so on, as in a diffusers folder, or single `.safetensors` files of them; one such file; or a hub id, likewise",
    )
    variant: Variant | None = Field(
        None, description="which of two models of one form a checkpoint is, where no key tells it, as with Z-Image"
    )
    without_t5: bool = Field(False, description="leave the T5 text encoder out, where the family works without it")


class TextSection(Section):
    """How text encoders read captions, and what of them is trained."""

    clip_skip: Annotated[int, Field(ge=1, le=12)] | None = Field(
        None,
        description="layer of the CLIP text encoders that is read, counted from the end as other programs do: 1 is the last, 2 the one before; empty means the model's own",
    )
    max_tokens: Literal[75, 150, 225] = Field(
        75, description="tokens of a caption that CLIP text encoders read, in pieces of 75"
    )
    t5_tokens: Annotated[int, Field(ge=16, le=1024)] | None = Field(
        None, description="tokens of a caption that T5 or a language model reads; empty means the family's own"
    )
    learning_rates: tuple[NotNegative, ...] = Field(
        (),
        description="train a LoRA on each text encoder with a rate of its own, in the model's order: `[5e-5]`, `[5e-5, 1e-5]`; T5 comes after CLIP; 0 leaves one as it is, empty trains none",
    )
    lora_rank: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        None, description="rank of the text encoders' LoRA; empty means `lora.rank`"
    )
    lora_alpha: Positive | None = Field(
        None, description="alpha of the text encoders' LoRA; empty means alpha = its rank"
    )
    tokens: tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\s.,:|\\/()\[\]{}\"'*?]+$")], ...] = (
        Field(
            (),
            description="new words whose embeddings are learned along with the LoRA (textual inversion, arXiv:2208.01618), such as `<zobo>`, with signs around them that no other word has; captions hold them like any word",
        )
    )
    token_vectors: Annotated[int, Field(ge=1, le=64)] = Field(4, description="embeddings of each new word")
    token_start: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="words whose embeddings the new ones start from; empty starts from the mean of all"
    )
    token_learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = Field(
        1e-3, description="rate of the new embeddings"
    )

    @property
    def trained(self) -> bool:
        """Whether anything of the text encoders is trained: captions are then encoded in each step."""
        return any(self.learning_rates) or bool(self.tokens)


class CaptionsSection(Section):
    """How captions are changed before training. All of it works with cached text-encoder outputs."""

    extension: str | None = Field(
        None, description="ending of caption files, such as `.caption`; empty means whatever is there"
    )
    separator: Annotated[str, Field(min_length=1)] = Field(",", description="what stands between tags")
    shuffle: bool = Field(False, description="tags in another order each time")
    keep_tokens: CountOrZero = Field(0, description="tags at the front that are neither shuffled nor dropped")
    keep_separator: str | None = Field(
        None, description="text in the caption that ends the tags kept at the front, such as `|||`"
    )
    prefix: str = Field("", description="text before every caption")
    suffix: str = Field("", description="text behind every caption")
    wildcards: bool = Field(False, description="`{red|blue}` means one of them each time; so does one of several lines")
    weighted_words: bool = Field(False, description="`(word:1.3)` weighs what the text encoder says of the word")
    trigger: str | None = Field(
        None, description="word that is learned: it replaces `[trigger]` and stands first if missing"
    )
    tag_dropout: Share = Field(0.0, description="share of tags left out each time")
    dropout: Share = Field(0.0, description="share of samples trained with the empty caption")
    dropout_every_epochs: CountOrZero = Field(
        0, description="every so many epochs all captions are empty; 0 means never"
    )
    variants: Annotated[int, Field(ge=1, le=256)] = Field(
        8, description="texts cached of each caption where shuffle, wildcards or tag dropout change it"
    )


class SourceSection(Section):
    """One folder or file of pictures, with what differs from `[data]` and `[captions]`."""

    path: Annotated[str, Field(min_length=1)] = Field(description="folder or file")
    repeats: Positive | None = Field(
        None, description="times each picture is seen in an epoch, over what folder names say; 0.5 sees half of them"
    )
    weight: NotNegative = Field(1.0, description="factor on the loss of its pictures")
    regularisation: bool = Field(
        False, description="prior preservation: as many of these as of the others are seen in an epoch"
    )
    caption: str | None = Field(None, description="caption of pictures that have none")
    captions_file: str | None = Field(None, description="one file with all captions: JSONL, JSON, CSV, Parquet or text")
    masks: str | None = Field(
        None, description="where the loss counts: `alpha`, or a folder of grey pictures with the same names"
    )
    resolutions: tuple[Side, ...] | None = Field(None, description="in place of `data.resolutions`")
    flip: bool | None = Field(None, description="in place of `data.flip`")
    colour_variants: CountOrZero | None = Field(None, description="in place of `data.colour_variants`")
    crop: CropName | None = Field(None, description="in place of `data.crop`")
    captions: CaptionsSection | None = Field(None, description="in place of all of `[captions]`")


def as_source(value: object) -> object:
    """A bare path is a source with nothing else said of it."""
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceSection, BeforeValidator(as_source)]


class DataSection(Section):
    sources: tuple[Source, ...] = Field(
        (), description="folders or files, or tables `[[data.sources]]`; empty means the built-in data set"
    )
    resolution: Side | None = Field(
        None, description="side in pixels of a square of the trained area; empty means the model's own"
    )
    resolutions: tuple[Side, ...] = Field(
        (), description="several sides trained in one run, each picture at each in turn; empty means `data.resolution`"
    )
    resolution_ceiling: Count | None = Field(None, description="highest resolution that the tier allows")
    allow_missing_captions: bool = Field(False, description="train pictures without a caption on the empty one")
    allow_upscale: bool = Field(False, description="accept pictures far smaller than they are trained at")
    no_upscale: bool = Field(False, description="never enlarge a picture: a small one gets a smaller bucket")
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = Field(
        2.0, description="longest side over shortest of a bucket"
    )
    bucket_step: Count | None = Field(
        None, description="sides of buckets are multiples of this many pixels; empty means the model's own step"
    )
    bucket_min: Side | None = Field(None, description="shortest side of a bucket in pixels; empty means no limit")
    bucket_max: Side | None = Field(None, description="longest side of a bucket in pixels; empty means no limit")
    crop: CropName = Field("centre", description="which part is cut out; `random` caches `data.crop_variants` places")
    crop_variants: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="places cached of each picture by `random`"
    )
    flip: bool = Field(False, description="every other time the picture is mirrored; both are cached")
    colour_variants: CountOrZero = Field(
        0, description="further versions of each picture with brightness, contrast, saturation and hue a little changed"
    )
    held_out: Annotated[float, Field(ge=0.0, le=0.5)] = Field(0.1, description="share of pictures kept for validation")
    held_out_seed: CountOrZero = Field(0, description="another number keeps other pictures")


class CacheSection(Section):
    folder: str | None = Field(None, description="where caches live; empty means the user's cache folder")
    batch: Count = Field(4, description="pictures encoded at once")
    limit_gb: Positive = Field(50.0, description="size on disk above which the least recently used entries leave")
    latents: bool = Field(True, description="false reads and encodes pictures while training, for want of disk")
    workers: CountOrZero | None = Field(
        None, description="threads that decode pictures; empty means one for each processor, at most 8"
    )
