"""Similar images: found among many, each group once, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lora_trainer.data import alike
from lora_trainer.data.alike import Alike, find_alike
from lora_trainer.data.images.measures import Seen, measure
from tests.data.drawings import drawing, photo, saved


def seen_of(hashes: list[int], seed: int = 0) -> list[Seen]:
    """Images with these hashes and one common thumbnail."""
    thumb = np.random.default_rng(seed).integers(0, 256, 192, dtype=np.uint8).tobytes()
    return [Seen(hash=each, mirror_hash=~each & (2**64 - 1), thumb=thumb, spread=50.0) for each in hashes]


@pytest.mark.parametrize("make", [photo, drawing])
def test_copies_are_found_and_other_images_are_not(make: object) -> None:
    images = [make(160, 128, seed) for seed in range(6)]  # type: ignore[operator]
    copies = [
        saved(images[1], "JPEG", quality=40),
        saved(images[3].resize((80, 64))),
        saved(images[1], "WEBP", quality=50),
        saved(images[4].transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
    ]
    found = find_alike([measure(saved(each)) for each in images] + [measure(each) for each in copies])
    assert found.groups == ((1, 6, 8), (3, 7))
    assert found.mirrored == ((4, 9),)
    assert found.pairs == 2
    assert found.leaders == {1: 1, 6: 1, 8: 1, 3: 3, 7: 3, 4: 4, 9: 4}


def test_leaders_go_through_groups_and_mirror_images() -> None:
    found = Alike(((0, 3), (2, 5)), ((0, 2), (1, 4), (2, 4)))
    assert found.leaders == dict.fromkeys(range(6), 0)


def test_neither_broken_nor_plain_images_look_the_same() -> None:
    plain = [measure(saved(Image.new("RGB", (64, 64), color))) for color in ("red", "red", "blue")]
    broken = [Seen(broken=("unreadable", "is empty.", "Replace it."))] * 2
    assert find_alike([*plain, *broken]) == Alike()
    assert find_alike([]) == Alike()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), st.sets(st.integers(0, 63), max_size=alike.MOST_BITS)), max_size=12),
)
def test_every_pair_within_the_bits_is_in_one_group(first: list[int], changed: list[tuple[int, set[int]]]) -> None:
    """Equal to comparing all pairs."""
    hashes = first + [first[place % len(first)] ^ sum(1 << bit for bit in bits) for place, bits in changed]
    groups = find_alike(seen_of(hashes)).groups
    named = {place: number for number, group in enumerate(groups) for place in group}
    for one in range(len(hashes)):
        near = [
            other
            for other in range(len(hashes))
            if other != one and (hashes[one] ^ hashes[other]).bit_count() <= alike.MOST_BITS
        ]
        assert (one in named) == bool(near)
        assert all(named[other] == named[one] for other in near)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**14 - 1), min_size=2, max_size=14), st.data())
def test_removing_one_image_removes_at_most_one_pair(hashes: list[int], data: st.DataObject) -> None:
    """The proof of the score relies on this. The bits are spread, so that chains and stars occur."""
    spread = [sum((each >> bit & 1) * (7 << (4 * bit)) for bit in range(14)) for each in hashes]
    gone = data.draw(st.integers(0, len(spread) - 1))
    before = find_alike(seen_of(spread)).pairs
    after = find_alike(seen_of(spread[:gone] + spread[gone + 1 :])).pairs
    assert before - 1 <= after <= before


def test_thousands_of_frames_of_one_scene_are_one_group() -> None:
    draw = np.random.default_rng(0)
    hashes = [0x0F0F_1234_5678_F0F0 ^ (1 << int(one)) ^ (1 << int(two)) for one, two in draw.integers(0, 64, (1500, 2))]
    found = find_alike(seen_of(hashes))
    assert [len(group) for group in found.groups] == [1500]
    assert found.pairs == 750


def test_pairs_of_a_large_group_are_counted() -> None:
    """Hundreds that resemble the first, but mostly not each other, are not half as many pairs."""
    draw = np.random.default_rng(0)
    places = np.argsort(draw.random((1500, 64)), axis=1)[:, : alike.MOST_BITS].tolist()
    hashes = [0, *(sum(1 << place for place in each) for each in places)]
    found = find_alike(seen_of(hashes))
    assert max(map(len, found.groups)) > 512
    pairs = 0
    for group in found.groups:
        left = list(group)
        while left:
            first = left.pop(0)
            near = [each for each in left if (hashes[first] ^ hashes[each]).bit_count() <= alike.MOST_BITS]
            left = [each for each in left if each not in near[:1]]
            pairs += bool(near)
    assert found.pairs == pairs < sum(len(group) // 2 for group in found.groups)
