"""The built-in tokenizer: distinct tokens for the model's words, and any caption can be tokenized."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CLIPTokenizer

from builtin_base.architecture import WORDS, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CLIPTokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_words_of_the_base_model_have_few_distinct_tokens(tokenizer: CLIPTokenizer) -> None:
    read = {word: tuple(tokenizer(word).input_ids[1:-1]) for word in WORDS}
    assert len(set(read.values())) == len(WORDS)
    assert all(len(ids) == 1 for ids in read.values())
    assert all(tokenizer.decode(ids).replace(" ", "") == word for word, ids in read.items())


@given(text=st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40))
def test_any_printable_caption_is_read_without_unknowns(tokenizer: CLIPTokenizer, text: str) -> None:
    ids = tokenizer(text).input_ids[1:-1]
    assert ids
    assert tokenizer.decode(ids).replace(" ", "") == text.lower().replace(" ", "")


@given(text=st.text(max_size=200))
def test_any_text_gives_77_tokens(tokenizer: CLIPTokenizer, text: str) -> None:
    ids = tokenizer(text, padding="max_length", max_length=77, truncation=True).input_ids
    assert len(ids) == 77
    assert all(0 <= i < len(tokenizer) for i in ids)


def test_names_become_tokens_and_every_call_gives_the_same_vocabulary(tmp_path: Path) -> None:
    names = ("maple leaf", "mountain cableway", "ring buoy", "orangutan", "ox")
    first, second = (make_tokenizer(tmp_path / folder, names) for folder in ("one", "two"))
    assert first.get_vocab() == second.get_vocab()
    words = [word for name in names for word in name.split()]
    assert all(len(first(word).input_ids) == 3 for word in words)
