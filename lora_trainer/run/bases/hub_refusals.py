"""Why a model of a hub cannot be had, in words: what the hub refuses, and what a repository holds instead. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.disk import FULL
from lora_trainer.core.errors import Problem, UsageError, first_line
from lora_trainer.models.folder import INDEX
from lora_trainer.run.bases.hub_files import ENCODER, PICKLES, HubFiles, single_checkpoints

if TYPE_CHECKING:
    from lora_trainer.run.bases.names import HubModel

TRY_AGAIN = "Run the same command again: the download resumes."


def not_here(model: HubModel, cache: Path, lacks: Collection[str]) -> Problem:
    """Offline, of a model that is not in the cache, or `lacks` something there."""
    what = f"{model} at {model.asked} is not in the Hugging Face cache ({cache})"
    if lacks:
        what = f"{model} is not whole in the Hugging Face cache: {', '.join(lacks)}"
    return Problem(
        "offline",
        f"{what}, and offline nothing is fetched.",
        "Run once without --offline (and without HF_HUB_OFFLINE), or name a folder of the model.",
    )


def no_such_file(model: HubModel, sizes: Collection[str]) -> Problem:
    there = ", ".join(single_checkpoints(sizes)[:5]) or "none"
    return Problem("hub_file_missing", f"{model.name} has no file {model.file}.", f"Its .safetensors files: {there}.")


def no_pipeline(model: HubModel, sizes: Collection[str]) -> Problem:
    """Of a repository that is no diffusers folder: what it is instead, and how to name it."""
    single = single_checkpoints(sizes)
    if "adapter_config.json" in sizes or any("lora" in name.lower() for name in single):
        return Problem(
            "model_is_lora", f"{model} holds a LoRA, not a model to train on.", "Name the base that it was trained on."
        )
    if "config.json" in sizes and any(name.startswith("diffusion_pytorch_model") for name in sizes):
        message = f"{model} is one part of a model: it has config.json and no {INDEX}."
        return Problem("one_part_of_model", message, "Name a whole model; a VAE is named with model.vae beside it.")
    if single:
        named = ", ".join(f"{model.name}/{name}" for name in single[:5])
        return Problem(
            "model_is_checkpoints",
            f"{model} holds single checkpoints and no {INDEX}.",
            f"Name one of its files: {named}.",
        )
    pickles = sorted(name for name in sizes if name.endswith(PICKLES))
    what = f"only {pickles[0][:80]}, a pickle" if pickles else f"no {INDEX}"
    return Problem(
        "model_missing",
        f"{model} holds {what}.",
        "Only models in .safetensors are loaded; look for another repository.",
    )


def no_parts(model: HubModel, names: Collection[str]) -> Problem:
    """Of a repository that has none of the parts that are wanted."""
    if model.parts == (ENCODER,):
        message = f"{model.origin}: {model} holds no image encoder: config.json is missing."
        return Problem("encoder_missing", message, "Name one such as facebook/dinov2-base, or leave it empty.")
    wanted = ", ".join(f"{part}/" for part in model.parts)
    single = single_checkpoints(names)
    named = ", ".join(f"{model.name}/{name}" for name in single[:5])
    fix = f"Name one of its files: {named}." if single else "Look for another repository."
    return Problem("hub_file_missing", f"{model.origin}: {model} holds no {wanted}.", fix)


def incomplete(model: HubModel, chosen: HubFiles) -> list[Problem]:
    fix = "Only whole models in .safetensors are loaded; look for another repository or revision."
    return [Problem("model_missing", f"{model}: {what}.", fix) for what in chosen.lacking]


@contextmanager
def explaining_refusals(model: HubModel) -> Iterator[None]:
    """Errors of the hub and of the network as UsageError: what happened, and what to do."""
    import httpx2
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model.name}"
    try:
        yield
    except errors.GatedRepoError as error:
        fix = f"Agree to its terms on {page}, then `hf auth login` or set HF_TOKEN."
        raise UsageError(
            Problem("hub_gated", f"{model} is gated: the hub wants its license to be accepted first.", fix)
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(
            Problem(
                "hub_revision_missing", f"{model} has no revision {model.asked}.", f"See {page}; check the revision."
            )
        ) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{model.name} is neither a folder here nor a model of the hub that this user may see."
        fix = f"Check {model.origin}: a folder is written ./{model.name}; a private model needs `hf auth login` or HF_TOKEN."
        raise UsageError(Problem("hub_model_missing", message, fix)) from error
    except errors.HfHubHTTPError as error:
        code = error.response.status_code
        if code in (401, 403):
            message = f"The hub refuses {model} to this user (error {code})."
            raise UsageError(
                Problem("hub_refused", message, "Log in with `hf auth login`, or check HF_TOKEN.")
            ) from error
        if code == 429:
            message = f"The hub limits how often {model} may be asked for (error 429)."
            fix = f"Try again in some minutes; `hf auth login` raises the limit. {TRY_AGAIN}"
            raise UsageError(Problem("hub_limits_requests", message, fix)) from error
        raise UsageError(
            Problem("hub_error", f"The hub answers {model} with error {code}.", f"Try again later. {TRY_AGAIN}")
        ) from error
    except (httpx2.HTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        message = f"The hub cannot be reached for {model}: {first_line(error)}."
        raise UsageError(
            Problem(
                "hub_unreachable",
                message,
                f"Check the network and HF_ENDPOINT; a folder is written ./{model}. {TRY_AGAIN}",
            )
        ) from error
    except OSError as error:
        if error.errno in FULL:
            message = f"{model} could not be fetched: the disk is full."
            fix = f"Free some space, or set HF_HOME to a folder on another disk. {TRY_AGAIN}"
            raise UsageError(Problem("disk_full", message, fix)) from error
        reason = first_line(error)
        raise UsageError(Problem("download_failed", f"{model} could not be fetched: {reason}.", TRY_AGAIN)) from error
    except (errors.HFValidationError, errors.FileMetadataError, ValueError) as error:
        raise UsageError(
            Problem("download_failed", f"{model} could not be fetched: {first_line(error)}.", f"Check {model.origin}.")
        ) from error
