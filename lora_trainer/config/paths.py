"""The settings that name files and folders: `path=` of a field of the schema says so, and everybody reads it here.

A run writes them as absolute paths, a batch reads those of a folder's own file from that folder, and the page holds them to its roots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from lora_trainer.config.schema import SourceSection
from lora_trainer.config.schema.types import PathKind
from lora_trainer.config.toml import section_types

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from lora_trainer.config.schema import Config


@cache
def path_settings() -> Mapping[str, PathKind]:
    """Each `section.key` that names files, and how."""
    return {
        f"{section}.{key}": kind
        for section, fields in section_types().items()
        for key, kind in paths_among(fields.model_fields)
    }


@cache
def source_paths() -> Mapping[str, PathKind]:
    """Each key of a source of `data.sources` that names files, and how."""
    return dict(paths_among(SourceSection.model_fields))


def paths_among(fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, PathKind]]:
    for key, field in fields.items():
        extra: Any = field.json_schema_extra
        kind = extra.get("path") if isinstance(extra, dict) else None
        if isinstance(kind, PathKind):
            yield key, kind


def with_paths(config: Config, change: Callable[[PathKind, str], str]) -> Config:
    """The config with each path changed: of a text, of a list, and the keys of a table. Words that are no path stay."""
    sections: dict[str, dict[str, Any]] = {}
    for name, kind in path_settings().items():
        section, key = name.split(".")
        value = getattr(getattr(config, section), key)
        sections.setdefault(section, {})[key] = changed(value, kind, change)
    sources = tuple(
        source.model_copy(
            update={key: changed(getattr(source, key), kind, change) for key, kind in source_paths().items()}
        )
        for source in config.data.sources
    )
    sections.setdefault("data", {})["sources"] = sources
    copies = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=copies)


def changed(value: Any, kind: PathKind, change: Callable[[PathKind, str], str]) -> Any:
    """A setting's value with its paths changed."""
    if isinstance(value, str):
        return value if not value or value in kind.words else change(kind, value)
    if isinstance(value, Mapping):
        return {changed(path, kind, change): about for path, about in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(changed(each, kind, change) for each in value)
    return value
