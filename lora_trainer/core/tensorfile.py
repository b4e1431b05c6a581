"""Read and check the header of a safetensors file without loading a tensor.

Standard library only, so that a damaged, disguised or hostile file is refused in milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_trainer.core.errors import Problem, UsageError

LARGEST_HEADER = 100_000_000  # bytes; the same limit as in the safetensors library
MOST_TENSORS = 200_000  # the largest models have a few thousand
MOST_SIDES = 16
SHOWN_OF_NAME = 80  # characters in a message
PICKLE_BEGINNINGS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
COPIED_AT_ONCE = 1 << 22  # bytes
BEGINNING = 64  # bytes after the first eight, enough to recognize a web page
METADATA = "__metadata__"
GGUF = b"GGUF"
NO_TENSORS = "is not a safetensors file"
AGAIN = "Copy or download it again."
# Other files that are often named like a model: their first bytes, what they are, the fix.
OTHERS = (
    (b"\x89PNG", "is an image (PNG)", "Name a .safetensors file."),
    (b"\xff\xd8\xff", "is an image (JPEG)", "Name a .safetensors file."),
    (b"RIFF", "is an image or sound (RIFF)", "Name a .safetensors file."),
    (b"GIF8", "is an image (GIF)", "Name a .safetensors file."),
    (GGUF, "is a GGUF file", "GGUF is read as a base model (--model); here, name a .safetensors file."),
    (b"version ", "is a Git LFS pointer, not the file itself", "Fetch the file: git lfs pull."),
    (b"%PDF", "is a PDF", "Name a .safetensors file."),
    (b"\x1f\x8b", "is packed (gzip)", "Unpack it first."),
    (b"7z\xbc\xaf", "is packed (7z)", "Unpack it first."),
)
PAGE = "is a web page (HTML), not a model: the site may require a login, or that you accept its terms"
JSON_TEXT = "is JSON text, not a model: it may be a site's error message"
_BITS = {64: "F64 I64 U64 C64", 32: "F32 I32 U32", 16: "F16 BF16 I16 U16", 6: "F6_E2M3 F6_E3M2", 4: "F4"}
_BITS[8] = "F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0 I8 U8 BOOL"
BITS = {name: bits for bits, names in _BITS.items() for name in names.split()}  # of one number of each type


def read_tensor_header(path: Path) -> dict[str, Any]:
    """The header: tensor names -> dtype, shape and data_offsets, and `__metadata__`.

    Raises UsageError if the file is missing, not a regular file, empty, a pickle, truncated or not
    safetensors, and if its tensors do not fill the rest of the file one after the other.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait forever
            raise refusal(path, "is not a regular file", "Name a .safetensors file.")
        with open(path, "rb") as file:
            beginning = file.read(8)
            if other := _other_file(beginning, file.read(BEGINNING)):
                raise refusal(path, *other)
            file.seek(len(beginning))
            header, length = _read_header(path, beginning, found.st_size, file.read)
    except OSError as error:
        raise refusal(
            path, f"cannot be read ({error.strerror or error})", "Check the path and its permissions."
        ) from error
    check_places(path, header, found.st_size - 8 - length, before=8 + length)
    return header


def data_begins(path: Path) -> int:
    """The byte from which a valid file's `data_offsets` are counted: the first, in a GGUF file."""
    if is_gguf(path):
        return 0
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
    return 8 + int(length)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF does; False for what cannot be opened, such as a pipe."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(GGUF)) == GGUF
    except OSError:
        return False


def is_pickle(beginning: bytes) -> bool:
    """Whether a file's first eight bytes are those of a pickle, or of an archive as torch packs it.

    A header of 640, 896, 1152 or 1408 bytes begins alike, but zeros follow, which no pickle can have there.
    """
    return beginning.startswith(PICKLE_BEGINNINGS) and beginning[2:8] != bytes(6)


def _other_file(beginning: bytes, more: bytes) -> tuple[str, str] | None:
    """What another kind of file is, and the fix; None if unknown.

    Checked before the header: eight letters read as a length would be a header of more than 2^56 bytes, so no valid
    file begins like these.
    """
    if len(beginning) == 8 and struct.unpack("<Q", beginning)[0] <= LARGEST_HEADER:
        return None
    text = (beginning + more).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<?xml", b"<!--")):
        return PAGE, "Log in there in a browser, or download it with the site's own program, and name that file."
    if text.startswith((b"{", b"[")):
        return JSON_TEXT, AGAIN
    return next((other[1:] for other in OTHERS if beginning.startswith(other[0])), None)


def _read_header(path: Path, beginning: bytes, size: int, read: Any) -> tuple[dict[str, Any], int]:
    if is_pickle(beginning):
        raise refusal(path, "is a pickle, which can run code when it is loaded", "Use a .safetensors file.")
    if len(beginning) < 8:
        raise refusal(path, f"has {size} bytes: it is empty or was cut off", AGAIN)
    (length,) = struct.unpack("<Q", beginning)
    if length > size - 8:
        raise refusal(path, f"{NO_TENSORS}, or was cut off: its header would take more than its {size:,} bytes", AGAIN)
    if length > LARGEST_HEADER:
        raise refusal(path, f"has a header of {length} bytes, more than {LARGEST_HEADER}", AGAIN)
    try:
        header = json.loads(read(length), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise refusal(path, f"{NO_TENSORS}: its header is nested too deeply", AGAIN) from None
    except ValueError as error:
        raise refusal(path, f"{NO_TENSORS}: its header is not JSON", AGAIN) from error
    if not isinstance(header, dict):
        raise refusal(path, f"{NO_TENSORS}: its header is not a JSON object", AGAIN)
    return header, length


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError for a duplicate name: readers differ on which one counts."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is a duplicate")
        found[name] = value
    return found


def check_places(path: Path, header: dict[str, Any], data: int, *, before: int = 0) -> None:
    """Raise UsageError unless the tensors fill exactly the `data` bytes after the header, each where its shape says.

    `before` is the size of what precedes them, so that messages name sizes of whole files, which users can compare.
    """
    metadata = header.get(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise refusal(path, f"{NO_TENSORS}: its {METADATA} is not an object of texts", AGAIN)
    tensors = {name: entry for name, entry in header.items() if name != METADATA}
    if len(tensors) > MOST_TENSORS:
        raise refusal(path, f"names {len(tensors)} tensors, more than {MOST_TENSORS}", AGAIN)
    places = sorted(_place(path, name, entry) for name, entry in tensors.items())
    end = 0
    for begin, until, name in places:
        if begin != end:
            raise refusal(
                path, f"is damaged: {name[:SHOWN_OF_NAME]!r} begins at byte {begin}, where {end} was expected", AGAIN
            )
        end = until
    if end != data:
        size, whole = f"{before + data:,}", f"{before + end:,}"
        if data < end:
            raise refusal(path, f"is cut off: it has {size} of the {whole} bytes that it promises", AGAIN)
        raise refusal(path, f"is damaged: it has {size} bytes, and it promises {whole}", AGAIN)


def _place(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    """First byte, byte after the last, name. Raises UsageError unless they match the type and shape."""
    try:
        begin, until = entry["data_offsets"]
        shape, bits = entry["shape"], BITS[entry["dtype"]]
        numbers = (begin, until, *shape)
        whole = len(shape) <= MOST_SIDES and all(type(each) is int and 0 <= each < 2**63 for each in numbers)
    except (TypeError, KeyError, ValueError) as error:
        reason = f"{NO_TENSORS}: {name[:SHOWN_OF_NAME]!r} has no offsets, shape or known type"
        raise refusal(path, reason, AGAIN) from error
    if not whole or math.prod(shape) * bits != (until - begin) * 8:
        facts = f"{entry['dtype']} {shape[:MOST_SIDES]} has bytes {begin} to {until}"
        raise refusal(path, f"is damaged: {name[:SHOWN_OF_NAME]!r} of {facts}", AGAIN)
    return begin, until, name


def rewrite_tensors(
    source: Path,
    target: Path,
    metadata: Mapping[str, str],
    change: Mapping[str, Callable[[dict[str, Any], bytearray], None]],
    hash_key: str,
) -> str:
    """Copy a safetensors file with other metadata, tensor by tensor; the functions in `change` alter the bytes of theirs.

    Names, types, shapes and the order of the bytes stay. A function gets the tensor's header entry and its bytes, which it
    changes in place. `hash_key` in the metadata is set to the hash of all bytes after the header, `0x` and SHA-256 in hex
    (ModelSpec's form), which is returned. Memory is that of the largest changed tensor. Raises UsageError for a
    damaged source, and OSError.
    """
    header = read_tensor_header(source)
    entries = {name: entry for name, entry in header.items() if name != METADATA}
    digest = hashlib.sha256()
    placeholder = "0x" + "0" * 64
    before = _header_bytes(entries, {**metadata, hash_key: placeholder})
    with open(source, "rb") as read, open(target, "wb") as write:
        read.seek(data_begins(source))
        write.write(before)
        for name in sorted(entries, key=lambda each: entries[each]["data_offsets"]):
            left = entries[name]["data_offsets"][1] - entries[name]["data_offsets"][0]
            if name in change:
                content = bytearray(left)
                if read.readinto(content) != left:
                    raise refusal(source, "ended while it was read", AGAIN)
                change[name](entries[name], content)
                digest.update(content)
                write.write(content)
                continue
            while left:
                if not (part := read.read(min(left, COPIED_AT_ONCE))):
                    raise refusal(source, "ended while it was read", AGAIN)
                digest.update(part)
                write.write(part)
                left -= len(part)
        found = f"0x{digest.hexdigest()}"
        write.seek(0)
        write.write(_header_bytes(entries, {**metadata, hash_key: found}))
    return found


def hash_of_tensors(path: Path) -> str:
    """The hash of all bytes after a file's header, as `rewrite_tensors` writes it, read a part at a time. Raises OSError."""
    digest = hashlib.sha256()
    begin = data_begins(path)
    with open(path, "rb") as file:
        file.seek(begin)
        while part := file.read(COPIED_AT_ONCE):
            digest.update(part)
    return f"0x{digest.hexdigest()}"


def _header_bytes(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """The length and the JSON of a header, filled with spaces to a multiple of 8 bytes."""
    text = json.dumps({METADATA: dict(metadata), **entries}, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def elements(header: dict[str, Any]) -> int:
    """Number of values in the tensors of a checked header."""
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != METADATA)


def refusal(path: Path, reason: str, fix: str) -> UsageError:
    return UsageError(Problem("tensor_file_damaged", f"{path} {reason}.", fix))
