"""Tensor files with a digest: any program reads them, and changes are detected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lora_trainer.lora_format.tensor_file import CODES, DamagedFile, read_sealed, verify_sealed, write_sealed

shapes = st.lists(st.integers(0, 4), max_size=3)
layouts = st.dictionaries(st.text(min_size=1, max_size=6), st.tuples(st.sampled_from(list(CODES)), shapes), max_size=5)


def tensors_of(layout: dict[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, (dtype, shape) in layout.items():
        tensors[name] = torch.randint(0, 2, shape).to(dtype)
    return tensors


@given(layouts)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_written_files_are_read_here_and_by_safetensors(tmp_path: Path, layout):
    if "__metadata__" in layout:
        return
    tensors, path = tensors_of(layout), tmp_path / "x.safetensors"
    digest = write_sealed(path, tensors, "x")
    verify_sealed(path, "x", digest)
    for read in (read_sealed(path, "x", digest), load_file(path)):
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype
            assert read[name].shape == tensor.shape
            assert torch.equal(read[name].float(), tensor.float())


def test_nonfinite_values_and_views_keep_their_bytes(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    square = torch.arange(6.0).view(2, 3).T
    write_sealed(tmp_path / "x", {"odd": odd, "square": square}, "x")
    read = read_sealed(tmp_path / "x", "x")
    assert read["odd"].view(torch.int32).tolist() == odd.view(torch.int32).tolist()
    assert torch.equal(read["square"], square)


def test_another_label_or_digest_is_detected(tmp_path):
    digest = write_sealed(tmp_path / "x", {"a": torch.ones(2)}, "x")
    for label, wanted in (("y", digest), ("y", None), ("x", "0" * 64)):
        with pytest.raises(DamagedFile, match=r"differs|another file"):
            read_sealed(tmp_path / "x", label, wanted)


def test_a_file_without_a_digest_is_read_only_when_none_is_required(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x")
    assert torch.equal(read_sealed(tmp_path / "x", "x")["a"], torch.ones(2))
    with pytest.raises(DamagedFile):
        read_sealed(tmp_path / "x", "x", "0" * 64)


def test_a_header_larger_than_its_file_allocates_no_memory(tmp_path):
    (tmp_path / "x").write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(DamagedFile, match="no sound length"):
        read_sealed(tmp_path / "x", "x")
    text = b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(DamagedFile, match="cut off"):
        read_sealed(tmp_path / "x", "x")


def test_a_full_disk_is_an_oserror_with_its_number():
    if not Path("/dev/full").is_char_device():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="No space") as caught:
        write_sealed(Path("/dev/full"), {"a": torch.ones(2)}, "x")
    assert caught.value.errno == 28
