"""Describe images with a model in a local folder: safetensors or ONNX only, no network, no code of its own.

A tagger names what it sees (`models/tagger.py`). Everything else writes sentences, and differs only in the text that it
reads beside an image: none or the beginning of the sentence (BLIP, GIT), the name of a task (Florence-2), or a request in
the model's chat template (Qwen2.5-VL, Qwen3-VL, JoyCaption and others of the LLaVA architecture).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.core.errors import Problem, UsageError
from lora_trainer.models.folder import check_part, read_config
from lora_trainer.models.known_captioners import ONNX
from lora_trainer.models.pretrained import LOCAL, explaining_folder, load_pretrained
from lora_trainer.models.tagger import Describe, load_onnx_tagger, load_tagger

if TYPE_CHECKING:
    import torch
    from PIL import Image

Length = Literal["short", "medium", "long"]
FLORENCE_TASKS = {"short": "<CAPTION>", "medium": "<DETAILED_CAPTION>", "long": "<MORE_DETAILED_CAPTION>"}
# JoyCaption was trained on these sentences; any chat model understands them.
REQUESTS = {
    "short": "Write a short descriptive caption for this image in a formal tone.",
    "medium": "Write a descriptive caption for this image in a formal tone.",
    "long": "Write a long descriptive caption for this image in a formal tone.",
}
CAPTIONER_ROLE = "You are a helpful image captioner."  # JoyCaption's own system message
MOST_TOKENS = {"short": 60, "medium": 120, "long": 300}
THRESHOLD = 0.35
LONGEST_SIDE = 1024  # pixels; models that read images as they are would need minutes for a photograph
SEED = 0
SAMPLING = {"do_sample": True, "num_beams": 1, "temperature": 0.8, "top_p": 0.95}
EXPECTED = (
    "Expected a transformers folder (a captioner, a chat model that sees images, or an image classifier): config.json, "
    "*.safetensors and the files of its image reader (and tokenizer); or a WD14 tagger: model.onnx and selected_tags.csv."
)


@dataclass(frozen=True)
class CaptionOptions:
    """What a user wants of a model; None leaves a choice to it. The first four are for captions, the others for tags."""

    prompt: str | None = None
    length: Length | None = None
    max_tokens: int | None = None
    candidates: int | None = None
    threshold: float | None = None
    blacklist: tuple[str, ...] = ()


@dataclass(frozen=True)
class Captioner:
    """`describe` gives the texts of each RGB image, the best first: none, one, or several candidates."""

    kind: Literal["captions", "tags"]
    describe: Describe


def load_captioner(folder: Path, device: torch.device, options: CaptionOptions) -> Captioner:
    """The captioner or tagger in a folder.

    Raises UsageError for a folder that holds no such model or only pickles of one, and for options of the other kind.
    """
    if not folder.is_dir():
        raise UsageError(Problem("model_missing", f"There is no model folder at {folder}.", EXPECTED))
    threshold = THRESHOLD if options.threshold is None else options.threshold
    if (folder / ONNX).is_file():
        check_options("tags", options)
        return Captioner("tags", load_onnx_tagger(folder, threshold, options.blacklist))
    config = read_config(folder, "config.json", expected=EXPECTED)
    stored_numbers = check_part(folder)
    architectures = [str(name) for name in config.get("architectures") or ()]
    with explaining_folder(folder, architectures, EXPECTED):
        if any(name.endswith("ForImageClassification") for name in architectures):
            check_options("tags", options)
            return Captioner("tags", load_tagger(folder, device, stored_numbers, threshold, options.blacklist))
        check_options("captions", options)
        return Captioner(
            "captions", _load_writer(folder, str(config.get("model_type")), device, options, stored_numbers)
        )


def check_options(kind: str, options: CaptionOptions) -> None:
    """Raise UsageError for options that a captioner or a tagger does not read."""
    set_here: dict[str, dict[str, Any]] = {
        "captions": {
            "--prompt": options.prompt,
            "--length": options.length,
            "--max-tokens": options.max_tokens,
            "--candidates": options.candidates,
        },
        "tags": {"--threshold": options.threshold, "--blacklist": options.blacklist or None},
    }
    other = "tags" if kind == "captions" else "captions"
    wrong = [flag for flag, value in set_here[other].items() if value is not None]
    if wrong:
        why = "It writes captions" if kind == "captions" else "It writes tags"
        raise UsageError(
            [
                Problem("option_not_for_model", f"This model does not read {flag}.", f"{why}: leave it out.")
                for flag in wrong
            ]
        )


def _load_writer(
    folder: Path, model_type: str, device: torch.device, options: CaptionOptions, stored_numbers: int
) -> Describe:
    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        message = f"{folder} holds a {model_type} model, which describes no images."
        fix = "Name a captioner, a chat model that sees images, or an image classifier with many labels."
        raise UsageError(Problem("captioner_unsupported", message, fix))
    reader, tokenizer = _load_reader(folder, model_type)
    text = _text_beside_images(folder, model_type, reader, options)
    model = load_pretrained(AutoModelForImageTextToText, folder, device, stored_numbers)
    if device.type == "cpu" and model.dtype == torch.float16:
        model = model.float()  # a CPU computes in float16 many times slower
    most_tokens = options.max_tokens or MOST_TOKENS[options.length or "medium"]
    # A chat model's answer follows the tokens that it read; an encoder's output does not repeat them.
    answers = bool(getattr(reader, "chat_template", None))

    def write(images: Sequence[Image.Image], **how: Any) -> list[str]:
        texts = {} if text is None else {"text": [text] * len(images), "padding": True}
        if answers and tokenizer.bos_token and str(text).startswith(tokenizer.bos_token):
            texts["add_special_tokens"] = False  # the template has written them
        smaller = [image.copy() for image in images]
        for image in smaller:
            image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        inputs = reader(images=smaller, return_tensors="pt", **texts).to(device, model.dtype)
        with torch.inference_mode():
            tokens = model.generate(**inputs, max_new_tokens=most_tokens, **how)
        if answers:
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        return [" ".join(each.split()) for each in tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def describe(images: Sequence[Image.Image]) -> list[list[str]]:
        found = [[each] for each in write(images, do_sample=False)]
        others = (options.candidates or 1) - 1
        if others:
            for own, image in zip(found, images, strict=True):
                # Random numbers begin anew for each image: what is written does not depend on where an earlier run stopped.
                with torch.random.fork_rng([device] if device.type == "cuda" else []):
                    torch.manual_seed(SEED)
                    own += write([image], num_return_sequences=others, **SAMPLING)
        return [[each for each in dict.fromkeys(own) if each] for own in found]

    return describe


def _load_reader(folder: Path, model_type: str) -> tuple[Any, Any]:
    """What makes a model's inputs from images and texts (transformers' `ProcessorMixin`), and its tokenizer.

    The image processor is that on PIL images: transformers' AutoProcessor would need torchvision.
    """
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **LOCAL)
    tokenizer = AutoTokenizer.from_pretrained(folder, **LOCAL)
    if model_type not in PROCESSOR_MAPPING_NAMES:  # an image encoder with a text decoder: it reads images alone
        return image_processor, tokenizer

    class WithoutVideos(getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])):  # type: ignore[misc]
        """The model's own, but with nothing in the place of what reads videos: that needs torchvision, and is not used."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
            return None

    parts = {"image_processor": image_processor, "tokenizer": tokenizer, "video_processor": None}
    described, _ = WithoutVideos.get_processor_dict(folder, **LOCAL)
    # A new answer is as long as the longest: padding is in front.
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    reader = WithoutVideos.from_args_and_dict([parts[name] for name in WithoutVideos.get_attributes()], described)
    reader.chat_template = reader.chat_template or tokenizer.chat_template
    return reader, tokenizer


def _text_beside_images(folder: Path, model_type: str, reader: Any, options: CaptionOptions) -> str | None:
    """The text that the model reads with each image; None where it reads images alone. Raises UsageError."""
    length = options.length or "medium"
    if model_type == "florence2":
        return options.prompt or FLORENCE_TASKS[length]
    if getattr(reader, "chat_template", None):
        return _in_chat(folder, reader, options.prompt or REQUESTS[length])
    if options.length is not None:
        message = f"{folder} ({model_type}) writes captions of one length."
        raise UsageError(Problem("option_not_for_model", message, "Leave --length out; --max-tokens limits a caption."))
    if options.prompt is not None and model_type != "blip":
        message = f"{folder} ({model_type}) reads no prompt."
        raise UsageError(Problem("option_not_for_model", message, "Leave --prompt out."))
    return options.prompt


def _in_chat(folder: Path, reader: Any, request: str) -> str:
    """A request in the model's chat template, with one place for an image. Raises UsageError where it has none."""
    from jinja2 import TemplateError

    place = reader.image_token
    if place in request:
        message = f"The prompt holds {place}, in whose place {folder} reads an image."
        raise UsageError(Problem("prompt_invalid", message, "Leave it out: the chat template puts it."))
    # JoyCaption's template puts the image itself, and prints a list as it is; the others want a list.
    with_text = [{"role": "system", "content": CAPTIONER_ROLE}, {"role": "user", "content": request}]
    with_list = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": request}]}]
    for messages in (with_text, with_list):
        try:
            text = reader.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError:
            continue
        if text.count(place) == 1:
            return str(text)
    message = f"The chat template of {folder} has no place for one image."
    raise UsageError(Problem("captioner_invalid", message, "Name a model that sees images."))
