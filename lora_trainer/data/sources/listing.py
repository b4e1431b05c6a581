"""What lies below a folder, from one pass over its entries."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.data.sources.names import is_image

if TYPE_CHECKING:
    from lora_trainer.data.sources.found import SourceReading

# Folders that a storage server, a system or an archiver makes: copies, thumbnails and deleted files. In small letters.
SYSTEM_FOLDERS = frozenset(
    {
        "@eadir",
        "#recycle",
        "#snapshot",
        "@recycle",
        "$recycle.bin",
        "__macosx",
        "lost+found",
        "system volume information",
    }
)
ICLOUD_ENDING = ".icloud"  # of what macOS leaves in place of a file: `.cat.jpg.icloud`


@dataclass(frozen=True)
class Listing:
    """The files below a folder, by the path of their folder from the root (with `/`, empty for the root).

    Hidden ones and `SYSTEM_FOLDERS` are skipped, and so are pipes, sockets and devices, unless they are named like images: then reading
    them reports what they are. Names are sorted, whatever the file system's order.
    """

    root: Path
    names: dict[str, tuple[str, ...]]
    in_icloud: tuple[str, ...] = ()  # names of files that are not on this disk

    def path(self, folder: str, name: str) -> Path:
        return self.root / folder / name


def names_in(folder: Path) -> tuple[str, ...]:
    """The files of one folder, hidden ones too; none of one that cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(entry.name for entry in entries if _kind(entry) == "file"))
    except OSError:
        return ()


def list_folder(root: Path, reading: SourceReading, without: Iterable[Path | None] = ()) -> Listing:
    """Linked folders are followed once, so links in circles end; `without` are folders to skip."""
    names: dict[str, tuple[str, ...]] = {}
    away: list[str] = []
    seen: set[tuple[int, int]] = set()
    left_out = {_identity(str(each)) for each in without}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        place = os.path.join(root, folder) if folder else str(root)
        identity = _identity(place)
        if identity is None or identity in seen or (folder and identity in left_out):
            continue
        seen.add(identity)
        files, folders = [], []
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        if entry.name.endswith(ICLOUD_ENDING):
                            away.append(entry.name[1 : -len(ICLOUD_ENDING)])
                        elif entry.name.startswith("._"):
                            reading.unread["._ of macOS"] += 1
                        continue
                    kind = _kind(entry)
                    if kind == "folder" and entry.name.lower() in SYSTEM_FOLDERS:
                        reading.unread[f"folder {entry.name}"] += 1
                    elif kind == "folder":
                        folders.append(entry.name)
                    elif kind == "file":
                        files.append(entry.name)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            reading.find(
                "unreadable", "error", f"cannot be opened ({reason}).", "Make it readable or remove it.", Path(place)
            )
            continue
        if files:
            names[folder] = tuple(sorted(files))
        # Popped from the end: in order of name, so that of two ways to a folder the first is taken.
        waiting.extend(f"{folder}/{name}" if folder else name for name in sorted(folders, reverse=True))
    return Listing(root, names, tuple(sorted(away)))


def _kind(entry: os.DirEntry[str]) -> str:
    """A link that leads nowhere counts as a file, to be named as unreadable."""
    try:
        if entry.is_file():
            return "file"
        if entry.is_dir():
            return "folder"
        lost = entry.is_symlink() and not os.path.exists(entry.path)
        return "file" if is_image(entry.name) or lost else ""
    except OSError:  # a link in a circle
        return "file"


def _identity(place: str) -> tuple[int, int] | None:
    try:
        found = os.stat(place)
    except OSError:
        return None
    return found.st_dev, found.st_ino
