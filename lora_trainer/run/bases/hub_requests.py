"""Every request to a hub, through the public functions of huggingface_hub. No torch.

A file that the hub keeps in Xet storage is downloaded by the hub's own library with hf_xet. Any other file is downloaded here,
because the library (2.4) begins an interrupted file anew: what has arrived stays beside the cache's files, and the next command
resumes at its last byte. Both are compared with the hub's digest before they enter the cache.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from lora_trainer.core.digests import remembered_sha256
from lora_trainer.core.disk import FULL, refusal, size_words
from lora_trainer.core.errors import Problem, UsageError, first_line
from lora_trainer.core.imports import is_installed
from lora_trainer.run.bases.hub_files import MOST_SMALL_BYTES

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

    from lora_trainer.run.bases.names import HubModel

COMMIT = re.compile(r"[0-9a-f]{40}")
ETAG = re.compile(r"[\w-]{1,128}", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}")
GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
PROGRESS_EVERY = 0.1  # of a file's bytes
TIMEOUT = 20.0  # seconds without an answer or a byte
TRIES = 5  # of a request that the hub is too busy for, and of a connection that breaks without a new byte
BUSY = (408, 429, 500, 502, 503, 504)  # worth asking again
LONGEST_WAIT = 60.0  # seconds that the hub may ask for before the command gives up
MOST_SKIPPED = 1 << 27  # bytes, of a server that begins each answer at the beginning of the file

Say = Callable[[str], None]
Answer = TypeVar("Answer")


def cached_repository(name: str) -> Path:
    """The folder of `owner/name` in the Hugging Face cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"


def is_offline() -> bool:
    """Whether the user's environment forbids requests (`HF_HUB_OFFLINE`)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def list_files(model: HubModel, say: Say) -> tuple[str, dict[str, int]]:
    """The commit and each file's bytes: the first request."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        info = _while_busy(
            lambda: api.model_info(model.name, revision=model.revision, files_metadata=True, timeout=TIMEOUT), say
        )
        commit, files = info.sha, info.siblings or []
        sizes = {str(file.rfilename): int(file.size or 0) for file in files}
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        message = f"The hub's answer about {model} cannot be read."
        raise UsageError(Problem("hub_answer_invalid", message, "Check HF_ENDPOINT.")) from error
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit) or any(size < 0 for size in sizes.values()):
        message = f"The hub's answer about {model} names no commit."
        raise UsageError(Problem("hub_answer_invalid", message, "Check HF_ENDPOINT."))
    return commit, sizes


def fetch_file(model: HubModel, commit: str, name: str, size: int, say: Say) -> None:
    """Download one file of `size` bytes into the cache.

    Raises UsageError for a cache that cannot be written to, and for bytes that differ from the hub's digest: these are deleted.
    """
    from filelock import FileLock
    from huggingface_hub import constants, hf_hub_download

    about = _metadata(model, commit, name, size, say)
    etag = str(about.etag)
    blobs, locks = _writable_folders(model)
    blob, part = blobs / etag, blobs / f"{etag}.part"
    has_xet = about.xet_file_data is not None and is_installed("hf_xet") and not constants.HF_HUB_DISABLE_XET
    with FileLock(locks / f"{part.name}.lock"):
        if not blob.exists() and not part.exists() and has_xet:
            progress = _progress_lines(name, size, say)
            try:
                hf_hub_download(model.name, name, revision=commit, etag_timeout=TIMEOUT, tqdm_class=progress)
            except (OSError, RuntimeError) as error:
                if refusal(error) in FULL:
                    raise
                say(f"  {name}: Xet storage failed ({first_line(error)[:200]}), so it comes by HTTP")
            # hf_xet keeps chunks that it has downloaded: asked again, it would use the same damaged ones.
            if blob.exists() and _differs(blob, etag):
                blob.unlink()
        if not blob.exists():
            _download(model, commit, name, part, size, say)
            if differs := "size" if part.stat().st_size != size else _differs(part, etag):
                part.unlink()
                message = f"{name} of {model} came with other bytes than the hub says (its {differs} differs)."
                fix = "Run the same command again: the file is downloaded anew."
                raise UsageError(Problem("download_damaged", message, fix))
            os.replace(part, blob)
    hf_hub_download(model.name, name, revision=commit, etag_timeout=TIMEOUT)  # its name in the cache


def range_reader(model: HubModel, commit: str, name: str, size: int, say: Say) -> Callable[[int, int], bytes]:
    """Reads bytes `[begin, end)` of a file of the hub, without downloading the rest."""
    about = _metadata(model, commit, name, size, say)
    headers = _headers_for(about, model, commit, name)
    return lambda begin, end: _while_busy(lambda: _read_range(about.location, headers, begin, end), say)


def _metadata(model: HubModel, commit: str, name: str, size: int, say: Say) -> HfFileMetadata:
    """Where a file of the listing lies, and its digest. Raises UsageError where the hub contradicts its listing."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model.name, name, revision=commit)
    about = _while_busy(lambda: get_hf_file_metadata(url, timeout=TIMEOUT), say)
    if not ETAG.fullmatch(about.etag or "") or about.commit_hash != commit or about.size != size:
        message = f"The hub says of {model}, {name}: {about.size} bytes at {str(about.commit_hash)[:12]}, in place of {size} at {commit[:12]}."
        raise UsageError(Problem("hub_changed", message, "Try again later; check HF_ENDPOINT."))
    return about


def _headers_for(about: HfFileMetadata, model: HubModel, commit: str, name: str) -> dict[str, str]:
    """Headers of a request for the file; the user's token is sent to the hub alone, never to where it redirects."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    hub = urlsplit(hf_hub_url(model.name, name, revision=commit)).netloc
    return build_hf_headers(token=None if urlsplit(about.location).netloc == hub else False)


def _writable_folders(model: HubModel) -> tuple[Path, Path]:
    """The cache's folders of the model's files and locks, as the hub's own library has them. Raises UsageError."""
    blobs = cached_repository(model.name) / "blobs"
    cache = blobs.parent.parent
    locks = cache / ".locks" / blobs.parent.name
    reason = ""
    try:
        for folder in (blobs, locks):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                reason = f"{folder.name} is read-only"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason:
        message = f"{model} must be downloaded, and the cache {cache} cannot be written to ({reason})."
        raise UsageError(Problem("cache_not_writable", message, "Set HF_HOME to a folder that can be written to."))
    return blobs, locks


def _download(model: HubModel, commit: str, name: str, part: Path, size: int, say: Say) -> None:
    """Append to `part` what it lacks of a file of `size` bytes.

    A connection that breaks is opened again at the last byte, and given up after TRIES without a new one. The hub is asked anew
    where the file lies, since such addresses expire. Raises the errors of
    httpx2 and of huggingface_hub, and OSError for a file that ends too early.
    """
    import httpx2

    tries = TRIES
    with open(part, "ab") as file:
        if file.tell() > size:
            file.truncate(0)
            file.seek(0)
        with _progress_lines(name, size, say)(initial=file.tell()) as progress:
            while (begin := file.tell()) < size:
                about = _metadata(model, commit, name, size, say)
                request = partial(
                    _append, about.location, _headers_for(about, model, commit, name), file, size, progress
                )
                try:
                    _while_busy(request, say)
                except (httpx2.TimeoutException, httpx2.NetworkError, httpx2.RemoteProtocolError):
                    tries = TRIES if file.tell() > begin else tries - 1
                    if tries == 0:
                        raise
                    sleep(1.0)
                else:
                    if file.tell() <= begin:
                        raise OSError(f"the answer ended at byte {begin} of {size}")


def _append(url: str, headers: Mapping[str, str], file: Any, size: int, progress: Any) -> None:
    """One request for the rest of a file, appended as it arrives."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    asked = {**headers, "Accept-Encoding": "identity"}
    if begin := file.tell():
        asked["Range"] = f"bytes={begin}-"
    with get_session().stream("GET", url, headers=asked, timeout=TIMEOUT, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        if begin and answer.status_code != 206:  # a server without ranges sends all of it again
            file.truncate(0)
            file.seek(0)  # `tell` is how much has arrived
            progress.update(-begin)
        for chunk in answer.iter_raw():
            file.write(chunk[: size - file.tell()])
            progress.update(len(chunk))


def _read_range(url: str, headers: Mapping[str, str], begin: int, end: int) -> bytes:
    """Bytes of a file on a server, also of one that does not know ranges: then what lies before is thrown away.

    Raises UsageError for an answer that is too short, and where too much would be thrown away.
    """
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    asked = {**headers, "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    found = bytearray()
    with get_session().stream("GET", url, headers=asked, timeout=TIMEOUT, follow_redirects=True) as answer:
        hf_raise_for_status(answer)
        ranged = answer.status_code == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {begin}-")
        skipped = 0 if ranged else begin
        if skipped > MOST_SKIPPED:
            message = "The server of the hub sends files from their beginning only."
            fix = "Download the file first, with `hf download` or by training."
            raise UsageError(Problem("hub_without_ranges", message, fix))
        for chunk in answer.iter_raw():
            found += chunk
            if len(found) >= skipped + end - begin:  # the rest of the file stays there
                break
    if len(found) < skipped + end - begin:
        message = f"The hub's answer ended after {len(found)} bytes, where {skipped + end - begin} were asked for."
        raise UsageError(Problem("download_cut_off", message, "Run the same command again."))
    return bytes(found[skipped : skipped + end - begin])


def _while_busy(request: Callable[[], Answer], say: Say) -> Answer:
    """The answer to a request. A hub that is too busy or limits requests (429) is asked again, after the time that it names."""
    from huggingface_hub.errors import HfHubHTTPError

    for tried in range(1, TRIES + 1):
        try:
            return request()
        except HfHubHTTPError as error:
            code, seconds = error.response.status_code, _seconds_to_wait(error.response.headers, tried)
            if code not in BUSY or seconds > LONGEST_WAIT or tried == TRIES:
                raise
            if seconds >= 5:
                say(f"the hub answers with error {code}: waiting {seconds:.0f} s")
            sleep(seconds)
    raise AssertionError("the last try returns or raises")


def _seconds_to_wait(headers: Mapping[str, str], tried: int) -> float:
    """What the hub asks for, else one second, then two, four, eight."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    asked = headers.get("Retry-After", "")
    if asked.isdigit():
        return float(asked)
    if (limit := parse_ratelimit_headers(headers)) is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    return float(2 ** (tried - 1))


def _differs(path: Path, etag: str) -> str:
    """Which digest of a file is not the hub's: sha256 of a large file, git's sha1 of a small one. Empty where it is the same."""
    if SHA256.fullmatch(etag):
        return "" if remembered_sha256(path) == etag else "sha256"
    if GIT_SHA1.fullmatch(etag):
        content = path.read_bytes()
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        return "" if digest == etag else "git sha1"
    return ""


def _progress_lines(name: str, size: int, say: Say) -> Any:
    """A kind of tqdm bar that prints a line for each tenth of a large file. Of several bars for one file, the first prints."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    printing: list[object] = []

    class ProgressLines(tqdm):  # type: ignore[misc]
        def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
            super().__init__(disable=True, total=size, initial=initial)  # tqdm itself shows nothing
            self.printed = initial / max(1, size)
            printing.append(self)
            if initial:
                say(f"  {name}: resuming at {size_words(initial)} of {size_words(size)}")

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self is printing[0] and size > MOST_SMALL_BYTES and self.n >= (self.printed + PROGRESS_EVERY) * size:
                self.printed = self.n / size
                say(f"  {name}: {size_words(int(self.n))} of {size_words(size)}")

    return ProgressLines
