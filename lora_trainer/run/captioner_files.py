"""Where a captioner's files are: a local folder, or a model that is known by name, downloaded with the user's consent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lora_trainer.core.disk import free_bytes, size_words
from lora_trainer.core.errors import Problem, UsageError, nearest
from lora_trainer.models.known_captioners import KNOWN_CAPTIONERS, ONNX, TAGS, WEIGHTS, KnownCaptioner
from lora_trainer.models.weight_files import weights_of
from lora_trainer.run.bases.hub_refusals import explaining_refusals
from lora_trainer.run.bases.hub_requests import cached_repository
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
    from huggingface_hub import constants

    found = _downloaded(known)
    if found is not None:
        return found
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    size = f"{known.gigabytes:g} GB"
    if offline or constants.HF_HUB_OFFLINE:
        message = f"{named} ({known.repository}, {size}) is not in the Hugging Face cache ({cache})"
        fix = "Run once without --offline (and without HF_HUB_OFFLINE), or name a folder of the model."
        raise UsageError(Problem("offline", f"{message}, and offline nothing is downloaded.", fix))
    snapshots = cached_repository(known.repository) / "snapshots"
    # Of the unfinished files of a stopped download nothing is used again (huggingface_hub 2.4).
    arrived = {path.resolve() for pattern in known.files for path in snapshots.glob(f"*/{pattern}") if path.is_file()}
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
    hub = HubModel(known.repository, known.revision)
    with explaining_refusals(hub):
        # Small files come first: where the weights are here, a stopped download has left nothing out.
        download(known.repository, known.revision, [each for each in known.files if each != WEIGHTS])
        folder = download(known.repository, known.revision, known.files)
    if not _is_whole(known, folder):
        message = f"{hub} has no complete set of {' and '.join(known.files[:2])}."
        raise UsageError(Problem("model_missing", message, "Name another captioner, or a folder."))
    return folder


def download(repository: str, revision: str | None, files: Sequence[str], *, offline: bool = False) -> Path:
    """A repository's files at its top, matched by patterns, in the Hugging Face cache. A file that is there is not downloaded again."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository, revision=revision, allow_patterns=list(files), ignore_patterns="*/*", local_files_only=offline
        )
    )


def _downloaded(known: KnownCaptioner) -> Path | None:
    """Its folder in the cache if it is whole there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = download(known.repository, known.revision, known.files, offline=True)
    except LocalEntryNotFoundError:
        return None
    return folder if _is_whole(known, folder) else None


def _is_whole(known: KnownCaptioner, folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    if known.writes == "tags":
        return {ONNX, TAGS} <= names
    readers = IMAGE_READERS & names and TOKENIZERS & names
    return bool("config.json" in names and readers and weights_of(names))
