"""What exporters and captioners leave in captions is named, and nothing that somebody would write is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lora_trainer.config.schema import CaptionsSection
from lora_trainer.core.findings import Finding
from lora_trainer.dataset_check.caption_patterns import LEFT_BEHIND, WITHOUT_OPTION, left_behind
from tests.data.drawings import photo
from tests.data.test_findings import judged, of, save

ORDINARY = (Path(__file__).parent / "ordinary_captions.txt").read_text("utf-8").splitlines()
REAL = Path(os.environ.get("REAL_IMAGES", "not named"))  # a folder of photographs with captions
LEFT = {
    "placeholder_caption": [
        "nan, nan", "#N/A", "test caption", "(none)",
        "True", "false", "#NAME?", "#REF!", "#VALUE!", "No photo description available.",
        "None", "null", "NaN", "nan.", "N/A", "n/a", "TODO", "todo", "TODO: describe", "FIXME", "TBD", "undefined",
        "Untitled", "[caption]", "<caption here>", "Enter a caption here", "your caption here", "No caption available.",
        "no description", "Lorem ipsum dolor sit amet, consectetur adipiscing elit.",
    ],
    "error_caption": [
        "Error: 429 Too Many Requests", "Internal Server Error", "Rate limit exceeded", "CUDA out of memory", "RuntimeError: CUDA out of memory.",
        "Traceback (most recent call last): File x", "Error code: 401 - {'error': 1}", "Connection error.", "503 Service Unavailable",
        "HTTPSConnectionPool(host='x', port=443): Max retries", "'NoneType' object has no attribute 'x'", "KeyError: 'caption'",
        "The response was blocked due to safety", "requests.exceptions.ConnectionError: x", "Rate limit reached for model x",
    ],
    "numbers_caption": [
        "0 0.5012 0.423 0.210 0.30", "[0.12, 0.44, 0.3]", "0.8731", "512 512 3", "0 0.5 0.4 0.2 0.3 1 0.1 0.2 0.3 0.4",
        "person 0.91 12 34 56 78", "1.2e-05 0.3 0.4", "(512, 512, 3)",
    ],
    "file_name_caption": [
        "Untitled design (3)", "download (3)", "pexels-photo-123456", "shutterstock_123456789", "00001", "2023-01-01", "cat.txt", "IMG-20230101-WA0001", "DALL·E 2023-01-01 10.00.00 - a cat", "FullSizeRender",
        "IMG_1234", "img 1234", "DSC0001.jpg", "_DSC0042", "DSCF1234", "IMG_20230704_123456", "PXL_20230101_123456789",
        "20230704_123456", "2023-07-04 12.34.56", "P1010023", "GOPR0123", "image (12)", "image_5", "image 123", "0042", "photo_3", "frame_000123",
        "my holiday photo.jpeg", "cat.png", "1girl_final.webp", "Screenshot 2024-01-01 at 10.00.00",
        "WhatsApp Image 2024-01-01 at 10.00.00", "ComfyUI_00001_", "00012-3456789012", "5123456",
        "d41d8cd98f00b204e9800998ecf8427e", "123e4567-e89b-12d3-a456-426614174000", "C:\\Users\\me\\cats\\12",
        "/home/me/data/train/0001", "./data/train/0001",
    ],
    "refusal_caption": [
        "My apologies, but I cannot describe this.", "I must decline.", "I don't have the ability to view images.", "As a large language model, I can't see.",
        "I'm sorry, but I can't help with that.", "I’m sorry, but I can’t describe this image.",
        "I am sorry, I cannot assist with identifying people.", "Sorry, I can't help with that request.",
        "I can't identify the person in this image.", "I cannot provide a description of this image.",
        "I'm unable to view the image.", "Unfortunately, I cannot see any image.", "I apologize, but I can't do that.",
        "As an AI language model, I do not see images.", "I'm sorry, no image was provided.",
        "It seems no image was attached. Please upload an image.", "Es tut mir leid, aber ich kann das nicht beschreiben.",
        "Je suis désolé, mais je ne peux pas décrire cette image.", "Lo siento, pero no puedo ayudar con eso.",
        "抱歉，我无法描述这张图片。", "很抱歉，我不能识别图中的人物。", "申し訳ありませんが、お手伝いできません。",
    ],
    "url_caption": [
        "https://i.imgur.com/abc.jpg", "ftp://example.com/cat.png",
        "https://example.com/cats/1", "www.example.com", "http://example.com", "source: https://example.com/1",
        "a cat on a mat https://example.com/cat",
    ],
    "parameters_caption": [
        "a cat\nNegative prompt: blurry, low quality\nSteps: 28, Sampler: Euler a, CFG scale: 7, Seed: 1, Size: 512x512",
        "a cat Negative prompt: dog Steps: 28, Sampler: DPM++ 2M Karras", "a cat, Steps: 20, Sampler: Euler, x",
        "a cat, Sampler: Euler a, CFG scale: 7, Seed: 12", "a girl, <lora:zobo:0.8>", "a castle --ar 16:9 --v 6", "a castle --niji 5",
        "a cat --n blurry --w 512", "a cat --v 6.1 --q 2", "a cat --w 512 --h 768 --d 1 --l 7 --s 28",
    ],
    "markup_caption": [
        "<p>a cat on a mat</p>", "a cat<br>on a mat", "a cat &amp; a dog", "don&#039;t, 1girl", '<a href="x">a cat</a>',
        '{"caption": "a cat on a mat"}', "{'caption': 'a cat'}", '["1girl", "solo"]', "['1girl', 'solo']",
        "a cat on a mat.\\nA dog beside it.", "a sign that says \\\"stop\\\"", "caf\\u00e9 at night",
        "<DETAILED_CAPTION>a cat", "a cat on a mat</s>", "a cat [SEP]", "a cat <image>",
        "{\\rtf1\\ansi\\deff0 a cat}", "('a cat',)", "b'a cat'", "np.str_('a cat')", "<generator object f at 0x7f00dead>", "('a cat', 'a dog')",
        "array(['a cat'])", "%PDF-1.4",
    ],
    "chat_caption": [
        "May be an image of 1 person and text", "May be a black-and-white photo of a dog", "The caption for the image is: a cat", "Prompt: a cat", "Question: what is it? Answer: a cat",
        "Here is a caption for the image: a cat on a mat. Let me know if you need more.",
        "Here's a detailed description of the image: a cat.", "Sure! Here is the caption you asked for. A cat.",
        "Certainly! Here's a description.", "Caption: a cat on a mat", "**Description:** a cat on a mat",
        "a cat on a mat. Let me know if you would like changes!", "a cat on a mat. I hope this helps!",
        "a cat on a mat<|im_end|>", "<think>the user wants a caption</think> a cat", "[INST] a cat", "```a cat```",
        "Voici une description de l'image : un chat.", "Hier ist eine Beschreibung des Bildes: eine Katze.",
        "以下是这张图片的描述：一只猫",
    ],
    "looping_caption": [
        "A cat is sitting on a mat. A cat is sitting on a mat.",
        "a cat on a mat. a cat on a mat. a cat on a mat.", "A cat sits. A dog lies down. A dog lies down. A dog lies down.",
        "a man with a hat, a man with a hat, a man with a hat", "the image of the image of the image of the image of the",
        "red red red red red red red red", "a cat ha ha ha ha ha ha ha ha ha ha", "一只红色的猫。一只红色的猫。一只红色的猫。",
    ],
    "cut_off_caption": [
        "A woman with long hair smiles. She is wearing a red dress and has", "The sky is blue. A child is looking at the sea with",
        "The image shows a woman in a red coat standing next to a", "A photo of a dog running on the beach with its",
        "In the background there are two trees, a house and", "Das Bild zeigt eine Frau mit einem Hut und",
    ],
    "escaped_brackets": ["hatsune miku \\(vocaloid\\), 1girl", "saber \\(fate\\)", "a \\[b\\] c"],
    "literal_wildcards": ["a {dog|cat} on a mat", "{a red|a blue} ball on grass"],
    "literal_trigger": ["[trigger] on a mat", "a photo of {trigger}", "a photo of <trigger>", "[triggerword] dog"],
    "literal_syntax": [
        "a photo of a [name]", "[filewords]", "a __color__ ball", "a cat BREAK a dog", "1girl, BREAK, red", "a cat, embedding:easynegative",
        "a [cat:dog:0.5]", "a [cat:0.5]",
    ],
    "literal_weights": ["(masterpiece:1.2), 1girl", "a cat, (blue eyes:0.8)"],
}  # fmt: skip
CASES = [(code, caption) for code, captions in LEFT.items() for caption in captions]


def found(folder: Path, caption: str, **rules: object) -> list[Finding]:
    """The findings of one image with this caption."""
    save(folder, "a", photo(160, 128, 0), caption)
    report = judged(of(folder), rules=CaptionsSection.model_validate(rules))
    return [each for each in report.findings if each.path == folder / "a.png"]


@pytest.mark.parametrize(("code", "caption"), CASES, ids=[f"{code}-{number}" for number, (code, _) in enumerate(CASES)])
def test_what_a_program_left_is_found(code: str, caption: str) -> None:
    literal = {each.code: each for each in WITHOUT_OPTION}
    if code in literal:
        assert literal[code].finds(caption)
        return
    pattern = left_behind(caption)
    assert pattern is not None
    assert pattern.code == code


def test_there_is_a_case_for_each_pattern() -> None:
    assert LEFT.keys() == {each.code for each in (*LEFT_BEHIND, *WITHOUT_OPTION)}


def test_nothing_is_found_in_ordinary_captions() -> None:
    """Tags, prose, single words and titles in several languages."""
    assert len(ORDINARY) >= 150
    assert not [caption for caption in ORDINARY if left_behind(caption)]
    assert not [caption for caption in ORDINARY if any(each.finds(caption) for each in WITHOUT_OPTION)]


@pytest.mark.skipif(not REAL.is_dir(), reason="REAL_IMAGES names no folder of photographs")
def test_nothing_is_found_in_real_captions() -> None:
    captions = [path.read_text("utf-8") for path in REAL.rglob("*.txt")]
    assert captions
    assert not [caption for caption in captions if left_behind(caption)]


@pytest.mark.parametrize("code", LEFT)
def test_a_dataset_of_them_is_named_file_by_file(code: str, tmp_path: Path) -> None:
    """One finding each, and not also one about its letters; a part of the files is accepted, all of them are not."""
    severities = {each.code: each.severity for each in (*LEFT_BEHIND, *WITHOUT_OPTION)}
    for number in range(10):
        save(tmp_path / "data", str(number), photo(160, 128, number), LEFT[code][number % len(LEFT[code])])
    report = judged(of(tmp_path / "data"))
    for path, findings in report.files.items():
        assert [(each.code, each.severity) for each in findings if each.code != "long_caption"] == [
            (code, severities[code])
        ], path
    costs_little = {"cut_off_caption", *(each.code for each in WITHOUT_OPTION)}
    assert report.passed == (code in costs_little)


def test_brackets_are_read_where_prompt_weighting_is_on(tmp_path: Path) -> None:
    caption = "hatsune miku \\(vocaloid\\), (blue eyes:1.2)"
    assert {each.code for each in found(tmp_path / "off", caption)} == {"escaped_brackets", "literal_weights"}
    assert found(tmp_path / "on", caption, prompt_weighting=True) == []


def test_wildcards_and_the_trigger_are_read_where_their_options_are_set(tmp_path: Path) -> None:
    caption = "[trigger], a {dog|cat} on a mat"
    assert {each.code for each in found(tmp_path / "off", caption)} == {"literal_wildcards", "literal_trigger"}
    assert found(tmp_path / "on", caption, wildcards=True, trigger_word="zobo") == []


@pytest.mark.parametrize(
    ("trigger", "caption"), [("nan", "nan"), ("img_1234", "img_1234, red"), ("None", "a None on a hill")]
)
def test_the_trigger_word_may_be_anything(trigger: str, caption: str, tmp_path: Path) -> None:
    assert found(tmp_path / "data", caption, trigger_word=trigger) == []


def test_a_trigger_word_before_it_hides_nothing(tmp_path: Path) -> None:
    for number, caption in enumerate(("zobo, None", "zobo IMG_1234", "zobo, I'm sorry, but I can't help with that.")):
        (finding,) = found(tmp_path / str(number), caption, trigger_word="zobo")
        assert finding.severity == "warning"


def test_the_caption_of_a_folder_or_a_source_is_intended(tmp_path: Path) -> None:
    save(tmp_path / "10_IMG 1234", "a", photo(160, 128, 0))
    (tmp_path / "10_IMG 1234" / "a.txt").unlink()
    assert {each.code for each in judged(of(tmp_path)).findings} == {"few_images"}


@pytest.mark.parametrize("caption", ["🙂", "🐈‍⬛", "♥♥♥", "…", "❤️ 🔥"])
def test_a_caption_of_emoji_alone_has_no_word(caption: str, tmp_path: Path) -> None:
    assert [each.code for each in found(tmp_path / "data", caption)] == ["meaningless_caption"]
