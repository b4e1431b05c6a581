"""What a run reads: the base model, text encoders, captions, datasets, caches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from lora_trainer.config.schema.types import (
    ON,
    PATH,
    PATH_OR_HUB,
    Count,
    CountOrZero,
    CropName,
    FamilyName,
    Flavor,
    LatentsDtype,
    NotNegative,
    PathKind,
    Positive,
    PredictionType,
    Section,
    Share,
    Side,
    setting,
)

# Of a source's fields that name files (`config/paths.py`).
NAMES_FILES: Any = {"path": PATH}
NAMES_MASKS: Any = {"path": PathKind(words=("alpha",))}
OF_TAGS = {"captions.shuffle": ON, "captions.tag_dropout": ON}


class ModelSection(Section):
    """The base model."""

    path: str | None = setting(
        None,
        "fixed in effect",
        "diffusers folder, one `.safetensors` checkpoint, or a hub id such as `owner/name` or `owner/name/file.safetensors`; empty means the built-in base model",
        path=PATH_OR_HUB,
    )
    family: FamilyName | None = setting(None, "fixed in effect", "model family; detected from the files when empty")
    revision: str | None = setting(
        None, "fixed in effect", "branch, tag or commit of a hub id; the commit used is written into `config.toml`"
    )
    vae: str | None = setting(
        None,
        "fixed in effect",
        "VAE to use instead of the model's own, with the same latents: a diffusers folder of it or of a whole model, one `.safetensors` file, or a hub id of either, such as `owner/name`; the commit used is written into `config.toml` as `owner/name@commit`",
        path=PATH_OR_HUB,
    )
    text_encoders: str | None = setting(
        None,
        "fixed in effect",
        "folder with text encoders and tokenizers that the model lacks, such as a checkpoint without them: `text_encoder_2/`, `tokenizer_2/` and so on, as in a diffusers folder, or single `.safetensors` files of them; one such file; or a hub id of either",
        path=PATH_OR_HUB,
    )
    flavor: Flavor | None = setting(
        None,
        "fixed in effect",
        "which of several models with the same keys a checkpoint is, such as `base` or `turbo`; `models.md` lists those of each family",
    )
    prediction_type: PredictionType | None = setting(
        None,
        "fixed in effect",
        "what a checkpoint with a U-Net predicts, `epsilon` or `v_prediction`, where its keys and metadata do not show it; empty means what they show",
    )
    training_adapter: str | None = setting(
        None,
        "fixed in effect",
        "LoRA file that is added to the model while training, and absent from images and from the LoRA: for distilled models, such as those called Turbo",
        path=PATH,
    )
    loras: dict[str, Annotated[float, Field(ge=-10.0, le=10.0)]] = setting(
        {},
        "fixed in effect",
        'LoRA files that are merged into the base model, and the factor on each: `{"style.safetensors" = 0.8}`; training, validation, images and the gate all use that model, and the trained LoRA is for it',
        path=PATH,
    )
    without_t5: bool = setting(
        False, "fixed in effect", "do not load the T5 text encoder, where the family works without it"
    )


class TextEncoderSection(Section):
    """How text encoders read captions, and which of them get a LoRA."""

    clip_skip: Annotated[int, Field(ge=1, le=12)] | None = setting(
        None,
        "fixed",
        "layer of the CLIP text encoders to read, counted from the end: 1 is the last, 2 the one before; empty means the model's own",
    )
    max_tokens: Literal[75, 150, 225] = setting(
        75, "fixed", "tokens of a caption that CLIP text encoders read, in chunks of 75; longer captions are truncated"
    )
    max_sequence_length: Annotated[int, Field(ge=16, le=1024)] | None = setting(
        None, "fixed", "tokens of a caption that T5 or a language model reads; empty means the family's own"
    )
    learning_rates: tuple[NotNegative, ...] = setting(
        (),
        "changes training",
        "train a LoRA on each text encoder with its own learning rate, in the model's order: `[5e-5]`, `[5e-5, 1e-5]`; T5 comes after CLIP; 0 does not train that one, empty trains none",
    )
    lora_rank: Annotated[int, Field(ge=1, le=4096)] | None = setting(
        None,
        "fixed",
        "rank of the text encoders' LoRA; empty means `lora.rank`",
        needs={"text_encoder.learning_rates": ON},
    )
    lora_alpha: Positive | None = setting(
        None,
        "fixed",
        "alpha of the text encoders' LoRA; empty means alpha = its rank",
        needs={"text_encoder.learning_rates": ON},
    )


class TextualInversionSection(Section):
    """New tokens whose embeddings are trained with the LoRA (textual inversion, arXiv:2208.01618)."""

    placeholder_tokens: tuple[
        Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\s.,:|\\/()\[\]{}\"'*?]+$")], ...
    ] = setting(
        (),
        "fixed",
        "tokens to learn, such as `<zobo>`; put signs around them that no other word has, and use them in captions like any word",
    )
    num_vectors: Annotated[int, Field(ge=1, le=64)] = setting(
        4, "fixed", "embeddings of each learned token", needs={"textual_inversion.placeholder_tokens": ON}
    )
    initializer_token: Annotated[str, Field(min_length=1)] | None = setting(
        None,
        "fixed",
        "words whose embeddings the learned tokens start from; empty starts from the mean of all",
        needs={"textual_inversion.placeholder_tokens": ON},
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = setting(
        1e-3,
        "changes training",
        "learning rate of the new embeddings",
        needs={"textual_inversion.placeholder_tokens": ON},
    )


class CaptionsSection(Section):
    """How captions change before each step. All of it works with cached text embeddings."""

    extension: str | None = setting(
        None, "fixed in effect", "extension of caption files, such as `.caption`; empty accepts whatever is there"
    )
    column: str | None = setting(
        None,
        "fixed in effect",
        "column of tables, or key of JSON, that holds captions; empty takes `text`, `caption`, `prompt` or `tags`",
    )
    separator: Annotated[str, Field(min_length=1)] = setting(
        ",",
        "fixed",
        "text between tags",
        needs=OF_TAGS | {"captions.trigger_word": ON, "captions.keep_tokens_separator": ON},
    )
    shuffle: bool = setting(False, "fixed", "shuffle the tags each time")
    keep_tokens: CountOrZero = setting(
        0, "fixed", "tags at the front that are neither shuffled nor dropped", needs=OF_TAGS
    )
    keep_tokens_separator: str | None = setting(
        None, "fixed", "text in the caption after the tags to keep at the front, such as `|||`"
    )
    prefix: str = setting("", "fixed", "text before every caption")
    suffix: str = setting("", "fixed", "text after every caption")
    wildcards: bool = setting(
        False, "fixed", "pick one of `{red|blue}` each time, and one line of a caption with several"
    )
    prompt_weighting: bool = setting(False, "fixed", "`(word:1.3)` scales the text embeddings of the word")
    trigger_word: str | None = setting(
        None,
        "fixed",
        "word to learn: it replaces `[trigger]`, is put first where it is missing, and alone where there is no caption",
    )
    tag_dropout: Share = setting(0.0, "fixed", "share of tags dropped each time")
    dropout: Share = setting(0.0, "fixed", "share of samples trained with an empty caption")
    dropout_every_n_epochs: CountOrZero = setting(0, "fixed", "empty all captions in every n-th epoch; 0 means never")
    variants: Annotated[int, Field(ge=1, le=256)] = setting(
        8,
        "fixed",
        "texts cached for each caption where shuffle, wildcards or tag dropout change it",
        needs=OF_TAGS | {"captions.wildcards": ON, "captions.variants": (1,)},
    )

    @property
    def drops_captions(self) -> bool:
        """Whether some samples are trained with an empty caption."""
        return self.dropout > 0 or self.dropout_every_n_epochs > 0


class SourceSection(Section):
    """One folder or file of images, with what differs from `[data]` and `[captions]`."""

    path: Annotated[str, Field(min_length=1)] = Field(
        description="folder, file, or address of tar shards such as `https://host/cats-{000..099}.tar`",
        json_schema_extra=NAMES_FILES,
    )
    repeats: Positive | None = Field(
        None,
        description="times each image is trained in an epoch; overrides the number in a folder's name; 0.5 trains half of them",
    )
    loss_weight: NotNegative = Field(1.0, description="factor on the loss of these images")
    is_reg: bool = Field(
        False, description="regularization images (prior preservation): as many of these as of the others in an epoch"
    )
    default_caption: str | None = Field(None, description="caption of images that have none")
    captions_file: str | None = Field(
        None,
        description="one file with all captions: JSONL, JSON, CSV, Parquet or text",
        json_schema_extra=NAMES_FILES,
    )
    masks: str | None = Field(
        None,
        description="where the loss counts: `alpha`, or a folder of gray images with the same names",
        json_schema_extra=NAMES_MASKS,
    )
    control_images: tuple[str, ...] = Field(
        (),
        description="folders of control images with the same names, for edit models; each folder is one more control of every image; `before/*_0` names those of a folder that are numbered",
        json_schema_extra=NAMES_FILES,
    )
    control_columns: tuple[str, ...] = Field(
        (), description="columns of the source's table that name control images, in place of folders or beside them"
    )
    resolutions: tuple[Side, ...] | None = Field(None, description="overrides `data.resolutions`")
    flip: bool | None = Field(None, description="overrides `data.flip`")
    color_variants: CountOrZero | None = Field(None, description="overrides `data.color_variants`")
    crop: CropName | None = Field(None, description="overrides `data.crop`")
    captions: CaptionsSection | None = Field(None, description="overrides all of `[captions]`")


def as_source(value: object) -> object:
    """A bare path is a source with only that set."""
    return {"path": value} if isinstance(value, str) else value


Source = Annotated[SourceSection, BeforeValidator(as_source)]


class DataSection(Section):
    """Which images are trained, at which size."""

    sources: tuple[Source, ...] = setting(
        (), "fixed in effect", "folders or files, or tables `[[data.sources]]`; empty means the built-in dataset"
    )
    num_class_images: CountOrZero = setting(
        0,
        "fixed in effect",
        "regularization images that the base model generates before training (prior preservation); 0 generates none",
    )
    class_prompts: tuple[str, ...] = setting(
        (),
        "fixed in effect",
        "prompts of the class images, in turn; empty means a list of people, animals, places and things",
        needs={"data.num_class_images": ON},
    )
    resolution: Side | None = setting(
        None,
        "fixed",
        "training resolution: the side in pixels of a square of the same area; empty means the model's own",
    )
    resolutions: tuple[Side, ...] = setting(
        (), "fixed", "several resolutions in one run, each image at each in turn; empty means `data.resolution`"
    )
    resolution_ceiling: Count | None = setting(
        None, "fixed in effect", "highest resolution that the VRAM preset allows"
    )
    allow_missing_captions: bool = setting(
        False, "fixed in effect", "train images without a caption on an empty one, where no trigger word is set"
    )
    allow_small_images: bool = setting(False, "fixed", "accept images far smaller than the training resolution")
    bucket_no_upscale: bool = setting(False, "fixed", "never enlarge an image: a small one gets a smaller bucket")
    max_aspect: Annotated[float, Field(ge=1.0, le=8.0)] = setting(
        2.0, "fixed", "longest side divided by shortest side of a bucket"
    )
    bucket_step: Count | None = setting(
        None,
        "fixed",
        "sides of buckets are multiples of this many pixels; empty means 64, less where the resolution is small or no multiple of it",
    )
    bucket_min: Side | None = setting(None, "fixed", "shortest side of a bucket in pixels; empty means no limit")
    bucket_max: Side | None = setting(None, "fixed", "longest side of a bucket in pixels; empty means no limit")
    crop: CropName = setting("center", "fixed", "which part to crop; `random` caches `data.crop_variants` crops")
    crop_variants: Annotated[int, Field(ge=1, le=64)] = setting(
        4, "fixed", "crops cached of each image by `random`", needs={"data.crop": ("random",)}
    )
    flip: bool = setting(False, "fixed", "mirror the image every other time; both are cached")
    color_variants: CountOrZero = setting(
        0, "fixed", "further versions of each image with slightly changed brightness, contrast, saturation and hue"
    )


class CacheSection(Section):
    """Where latents and text embeddings are cached, and how much of them."""

    dir: str | None = setting(
        None, "changes nothing", "folder of the caches; empty means the user's cache folder", path=PATH
    )
    batch_size: Count = setting(4, "changes rounding", "images encoded at once")
    limit_gb: Positive = setting(
        50.0, "changes nothing", "size on disk above which the least recently used entries are deleted"
    )
    latents: bool = setting(True, "changes rounding", "false encodes images while training, to save disk space")
    latents_dtype: LatentsDtype = setting(
        "fp32", "changes rounding", "precision of cached latents: `bf16` and `fp16` take half of the disk space"
    )
    workers: CountOrZero | None = setting(
        None, "changes nothing", "threads that decode images; empty means one for each CPU, at most 8"
    )
