"""Where a captioner's files are: a local folder, or a model that is known by name, downloaded with the user's consent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lora_trainer.core.disk import free_bytes, size_words
from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.models.known_captioners import KNOWN_CAPTIONERS, ONNX, TAGS, KnownCaptioner
from lora_trainer.models.weight_files import weights_of
from lora_trainer.run.bases.hub import cached, fetch_matching
from lora_trainer.run.bases.hub_requests import cached_repository, is_offline
from lora_trainer.run.bases.names import HubModel

IMAGE_READERS = {"preprocessor_config.json", "processor_config.json"}
TOKENIZERS = {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}
ROOM = 1.02  # of what is downloaded: sizes are rounded, and file systems need some for themselves


def known_captioner(named: str) -> KnownCaptioner | None:
    """What the table says of a name; None for a folder. Raises UsageError for what is neither."""
    if Path(named).expanduser().is_dir():
        return None
    if named in KNOWN_CAPTIONERS:
        return KNOWN_CAPTIONERS[named]
    if "/" in named or "\\" in named:
        message = f"There is no model folder at {named} (looked for in {Path.cwd()})."
        raise UsageError(
            Problem("model_missing", message, "Check --model, or use a name of `lora-trainer caption --list`.")
        )
    raise UsageError(
        Problem(
            "captioner_unknown",
            f"--model {named} is neither a folder nor a known captioner.",
            nearest(named, KNOWN_CAPTIONERS),
        )
    )


def find_captioner(named: str, *, offline: bool, consent: Callable[[str], bool], say: Callable[[str], None]) -> Path:
    """The folder of a captioner. One that is known by name is downloaded if `consent` agrees to the sentence about it.

    Raises UsageError for what is no captioner, for a refused or impossible download, and with `offline` for one that
    is not here.
    """
    known = known_captioner(named)
    if known is None:
        return Path(named).expanduser()
    model = HubModel(known.repository, known.revision)
    found = cached(model)
    if found is not None and _is_whole(known, found.folder):
        return found.folder
    storage = cached_repository(known.repository)
    cache = storage.parent
    size = f"{known.gigabytes:g} GB"
    if offline or is_offline():
        message = f"{named} ({known.repository}, {size}) is not in the Hugging Face cache ({cache})"
        fix = "Run once without --offline (and without HF_HUB_OFFLINE), or name a folder of the model."
        raise UsageError(Problem("offline", f"{message}, and offline nothing is downloaded.", fix))
    snapshots = storage / "snapshots"
    arrived = {path.resolve() for pattern in known.files for path in snapshots.glob(f"*/{pattern}") if path.is_file()}
    arrived |= set((storage / "blobs").glob("*.part"))
    needed, free = known.gigabytes * 1e9 - sum(path.stat().st_size for path in arrived), free_bytes(cache)
    if needed * ROOM > free:
        message = f"{named} needs {size}, and the disk of {cache} has {size_words(free)} free."
        raise UsageError(Problem("disk_full", message, "Free some space, or set HF_HOME to a folder on another disk."))
    about = f"{named} is {known.repository}: {size}, license {known.license}."
    if not consent(f"{about} Download it to {cache}?"):
        fix = "Add --yes to download it, or name a folder of the model."
        raise UsageError(
            Problem("consent_missing", f"{about} It is not here, and is not downloaded without consent.", fix)
        )
    say(f"downloading {known.repository}: {size} to {cache}")
    folder = fetch_matching(model, known.files, say)
    if not _is_whole(known, folder):
        message = f"{model} has no complete set of {' and '.join(known.files[:2])}."
        raise UsageError(Problem("model_missing", message, "Name another captioner, or a folder."))
    return folder


def _is_whole(known: KnownCaptioner, folder: Path) -> bool:
    if not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    if known.writes == "tags":
        return {ONNX, TAGS} <= names
    readers = IMAGE_READERS & names and TOKENIZERS & names
    return bool("config.json" in names and readers and weights_of(names))
