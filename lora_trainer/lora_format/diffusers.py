"""The format that diffusers' `load_lora_weights` reads: lora_A and lora_B by module, alpha in the header."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from lora_trainer.lora_format.keys import DIFFUSERS_DOWN, DIFFUSERS_UP

if TYPE_CHECKING:
    from torch import Tensor

    from lora_trainer.lora_format.weights import LoraWeights

ADAPTER_METADATA_KEY = "lora_adapter_metadata"  # diffusers.loaders.lora_base.LORA_ADAPTER_METADATA_KEY

# Arguments of peft's LoraConfig that only describe the file's own tensors; all others may read or change more.
DESCRIBING = frozenset(
    "r lora_alpha rank_pattern alpha_pattern target_modules exclude_modules lora_dropout bias fan_in_fan_out use_rslora "
    "layers_to_transform layers_pattern peft_type peft_version task_type inference_mode revision auto_mapping "
    "base_model_name_or_path lora_bias qalora_group_size".split()
)
UNSET = {"megatron_core": ("megatron.core",), "init_lora_weights": (True, "gaussian")}  # as peft writes them
NUMBERED = re.compile(r"(^|\.)\d+\.")  # inside a block: no other module's name ends so
PLAIN = re.compile(r"[\w.-]+")


def diffusers_tensors(weights: LoraWeights) -> dict[str, Tensor]:
    """The file's tensors: A `[r, in]`, B `[out, r]`. Never `.alpha`: diffusers refuses it here."""
    tensors: dict[str, Tensor] = {}
    for module, pair in weights.modules.items():
        tensors[module + DIFFUSERS_DOWN] = pair.down
        tensors[module + DIFFUSERS_UP] = pair.up
    return tensors


# Without `lora_A` in the first key diffusers takes a file for one of before peft, and this layer for a list of layers.
RENAMED_MAGNITUDE = ".to_out.lora_magnitude_vector"


def renamed_magnitudes(keys: Iterable[str]) -> list[str]:
    """The magnitudes that diffusers would look for by another name; their layers then raise in the first forward pass.

    `keys` are those of a file in the order of its bytes. diffusers looks at the first one of each component.
    """
    by_component: dict[str, list[str]] = {}
    for key in keys:
        by_component.setdefault(key.partition(".")[0], []).append(key)
    misread = [own for own in by_component.values() if "lora_A" not in own[0]]
    return [key for own in misread for key in own if RENAMED_MAGNITUDE in key]


def with_first_pair_first(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, of which diffusers renames no magnitude.

    Magnitudes are in fp32, and so they lie before pairs in fp16. Where that matters the first pair of each component is stored
    in fp32 too, with the same numbers: its `lora_A` comes before all magnitudes by its name.
    """
    stored = dict(tensors)
    # safetensors stores wide numbers first, then by name.
    in_order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))
    for component in {key.partition(".")[0] for key in renamed_magnitudes(in_order)}:
        downs = [key for key in tensors if key.startswith(f"{component}.") and key.endswith(DIFFUSERS_DOWN)]
        for down in sorted(downs)[:1]:  # none where the magnitudes are over other changes than pairs
            for key in (down, down.removesuffix(DIFFUSERS_DOWN) + DIFFUSERS_UP):
                stored[key] = tensors[key].float()
    return stored


def adapter_metadata(weights: LoraWeights) -> str:
    """The header's JSON: arguments of peft's LoraConfig, each behind its component's name.

    Ranks and alphas that differ from the component's commonest go into the patterns. Modules of a text encoder are named
    without `text_model.`: newer transformers have no such module, and peft finds the name's end with older ones too.
    """
    by_component: dict[str, dict[str, tuple[int, float]]] = {}
    for module, pair in weights.modules.items():
        component, _, rest = module.partition(".")
        by_component.setdefault(component, {})[rest.removeprefix("text_model.")] = (pair.rank, pair.alpha)
    document: dict[str, Any] = {}
    for component, modules in by_component.items():
        kinds = sorted(modules.values())
        rank, alpha = max(kinds, key=kinds.count)
        config = {
            "r": rank,
            "lora_alpha": _number(alpha),
            "rank_pattern": {_whole(name): r for name, (r, _) in modules.items() if r != rank},
            "alpha_pattern": {_whole(name): _number(a) for name, (_, a) in modules.items() if a != alpha},
            "target_modules": _targets(sorted(modules)),
            "lora_dropout": 0.0,
            "bias": "none",
        }
        document |= {f"{component}.{key}": value for key, value in config.items()}
    return json.dumps(document, sort_keys=True)


def _whole(name: str) -> str:
    """A key that peft matches with this module alone: plain `proj_out` would match each block's `proj_out` too."""
    return name if NUMBERED.search(name) else f"^{name}"


def _targets(names: list[str]) -> list[str] | str:
    """peft's target modules: names, or one pattern where a name could be the end of others."""
    if all(NUMBERED.search(name) for name in names):
        return names
    return "|".join(f"(.*\\.)?{re.escape(name)}" if NUMBERED.search(name) else re.escape(name) for name in names)


def _number(alpha: float) -> int | float:
    return int(alpha) if alpha == int(alpha) else alpha


def alphas(
    metadata: Mapping[str, str], ranks: Mapping[str, int], peft_config: Mapping[str, Any] | None = None
) -> dict[str, float]:
    """The alpha of each module as diffusers would read it: from the header's JSON, else alpha = rank.

    Without a header entry, `peft_config` counts for all components. A rank-stabilized scale, alpha / sqrt(rank), is
    returned as the alpha whose alpha / rank is the same. Raises ValueError when the JSON cannot be read.
    """
    document = config_in(metadata)
    found: dict[str, float] = {}
    for module, rank in ranks.items():
        component, _, rest = module.partition(".")

        def setting(key: str, component: str = component) -> Any:
            return document.get(f"{component}.{key}") if document else (peft_config or {}).get(key)

        alpha = _by_pattern(setting("alpha_pattern") or {}, rest, setting("lora_alpha"))
        if alpha is None:
            alpha = rank
        found[module] = float(alpha) * (math.sqrt(rank) if setting("use_rslora") else 1.0)
    return found


def _by_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """As peft looks a module up: by the first key that is the end of its name, or matches it."""
    names = (name, name.removeprefix("text_model."))
    for key, value in pattern.items():
        matches = _matcher(key)
        if any(each == key or each.endswith(f".{key}") or (matches and matches.fullmatch(each)) for each in names):
            return value
    return default


@cache
def _matcher(key: str) -> re.Pattern[str] | None:
    """The pattern of a key; None for a plain name. Raises ValueError for an invalid pattern."""
    if PLAIN.fullmatch(key):
        return None
    try:
        return re.compile(rf"(.*\.)?({key})")
    except re.error:
        raise ValueError(f"{key!r} is no pattern") from None


def config_in(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header's JSON. Raises ValueError when it cannot be read."""
    try:
        document = json.loads(metadata.get(ADAPTER_METADATA_KEY) or "{}")
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def reaching_further(document: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Keys of peft's config that would make peft import, read or change more than the file's own tensors, or search for longer
    than anybody waits. `names` are those of the file's layers.

    diffusers hands all of the header's JSON to peft's LoraConfig, whose arguments name modules to import, files to read and
    methods that change the base model itself (PiSSA, OLoRA, CorDA).
    """
    found = []
    for name, value in document.items():
        key = name.rpartition(".")[2]
        describes = key in DESCRIBING or not _is_set(value) or value in UNSET.get(key, ())
        patterns = [pattern for pattern in _patterns(key, value) if not PLAIN.fullmatch(pattern)]
        if not describes or takes_too_long(patterns, names):
            found.append(name)
    return found


def _is_set(value: Any) -> bool:
    """False for null, false, and for tables that hold nothing else."""
    return any(map(_is_set, value.values())) if isinstance(value, dict) else value not in (None, False, [], "")


def _patterns(key: str, value: Any) -> Iterator[str]:
    """Patterns that peft matches against names of modules."""
    if key.endswith(("_pattern", "_modules")):
        yield from (each for each in ([value] if isinstance(value, str) else value or ()) if isinstance(each, str))


# How long the search for a pattern of a header may take: they are regular expressions of strangers. Python cannot interrupt a
# search, so a pattern is counted before it is used.
MOST_PLACES = 3e8  # of all patterns and names together: seconds
# Repeated groups, groups with flags or a look-around, and references to groups.
UNCOUNTED = re.compile(r"\)\s*[*+{]|[*+}][*+]|\(\?(?!:)|\\\d")
ATOMS = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)  # an escape or a class is one letter
REPEATS, CHOICES = re.compile(r"[*+{]"), re.compile(r"[?|]")
ANY_PARENT = r"(.*\.)?"  # how peft begins a pattern


def takes_too_long(patterns: Iterable[str], names: Sequence[str]) -> bool:
    """Whether patterns could take too long on names, or cannot be counted."""
    longest = max(map(len, names), default=1)
    places = 0.0
    for pattern in patterns:
        places += _places(pattern, longest) * max(1, len(names))
        if places > MOST_PLACES:
            return True
    return False


def _places(pattern: str, length: int) -> float:
    """The most places at which a search may be on a name of this length: each repetition may end anywhere in it."""
    if UNCOUNTED.search(ATOMS.sub("a", pattern.replace(ANY_PARENT, ""))) or UNCOUNTED.search(pattern):
        return math.inf
    places = 0.0
    for alternative in _alternatives(ATOMS.sub("a", pattern.replace(ANY_PARENT, "*"))):
        repeats = len(REPEATS.findall(alternative)) + 1  # one for the parent that peft puts before all
        places += math.comb(length + repeats, repeats) * 2.0 ** min(1000, len(CHOICES.findall(alternative)))
    return places


def _alternatives(pattern: str) -> list[str]:
    """The parts of a pattern between bars outside of groups."""
    parts, depth = [""], 0
    for letter in pattern:
        depth += (letter == "(") - (letter == ")")
        if letter == "|" and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
