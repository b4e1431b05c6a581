"""Programs on this computer that draw with LoRAs, and the models in their folders: ComfyUI, Forge and A1111. No torch.

A program is looked for where its installer, its documentation and rented machines put it, and where its variable points. Nothing
is searched recursively but its own model folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from lora_trainer.core.errors import UsageError
from lora_trainer.models.single.recognize import recognize

COMFYUI, FORGE = "comfyui", "forge"
TITLES = {COMFYUI: "ComfyUI", FORGE: "Forge or A1111"}
VARIABLES = {COMFYUI: "COMFYUI_PATH", FORGE: "FORGE_PATH"}
# Below the home folder, the current folder and its parent, and where rented machines have them.
USUAL_PLACES = {
    COMFYUI: (
        "ComfyUI",
        "comfy/ComfyUI",  # comfy-cli
        "Documents/ComfyUI",  # ComfyUI Desktop
        "ComfyUI_windows_portable/ComfyUI",
    ),
    FORGE: (
        "stable-diffusion-webui-forge",
        "stable-diffusion-webui-reForge",
        "sd-webui-forge-classic",
        "webui_forge_cu121_torch231/webui",
        "stable-diffusion-webui",
    ),
}
# Of its code, or what it makes where its code lies elsewhere (ComfyUI Desktop): a folder `models` alone may be anybody's.
OWN_FILES: Mapping[str, tuple[str, ...]] = {COMFYUI: ("comfy/sd.py", "custom_nodes"), FORGE: ("webui.py",)}
RENTED = (Path("/workspace"), Path("/opt"))
BASES: Mapping[str, tuple[str, ...]] = {
    COMFYUI: ("checkpoints", "diffusion_models", "unet"),
    FORGE: ("Stable-diffusion",),
}
LORAS = {COMFYUI: "loras", FORGE: "Lora"}
TEXT_ENCODERS: Mapping[str, tuple[str, ...]] = {COMFYUI: ("text_encoders", "clip"), FORGE: ("text_encoder",)}
VAES: Mapping[str, tuple[str, ...]] = {COMFYUI: ("vae",), FORGE: ("VAE",)}
ENDINGS = (".safetensors", ".gguf")
MOST_YAML_BYTES = 1 << 20


@dataclass(frozen=True)
class Program:
    """An installed program: `folder` is its own, `kind` one of COMFYUI and FORGE."""

    kind: str
    folder: Path

    @property
    def title(self) -> str:
        return TITLES[self.kind]

    @property
    def loras(self) -> Path:
        """Where it looks for LoRA files."""
        return self.folder / "models" / LORAS[self.kind]

    def model_folders(self, names: tuple[str, ...]) -> list[Path]:
        """Its folders of a kind of model, those of ComfyUI's extra_model_paths.yaml too; existing ones alone."""
        own = [self.folder / "models" / name for name in names]
        extra = _extra_model_paths(self.folder, names) if self.kind == COMFYUI else []
        return [folder for folder in dict.fromkeys((*own, *extra)) if folder.is_dir()]

    @property
    def text_encoders(self) -> Path | None:
        return next(iter(self.model_folders(TEXT_ENCODERS[self.kind])), None)


@dataclass(frozen=True)
class FoundModel:
    """A file of a base model in a program's folder."""

    path: Path
    family: str
    program: Program


def find_programs(environment: Mapping[str, str] | None = None) -> list[Program]:
    """The programs on this computer; one that a variable names comes first among its kind."""
    variables = os.environ if environment is None else environment
    found: dict[Path, Program] = {}
    for kind, variable in VARIABLES.items():
        named = [Path(variables[variable]).expanduser()] if variables.get(variable) else []
        roots = (Path.cwd(), Path.cwd().parent, Path.home(), *RENTED)
        usual = [root / place for root in roots for place in USUAL_PLACES[kind]]
        for folder in (*named, *usual, Path.cwd()):
            if is_program(kind, folder):
                found.setdefault(folder.resolve(), Program(kind, folder.resolve()))
    return list(found.values())


def find_files(programs: list[Program]) -> list[FoundModel]:
    """The base models in the programs' folders, recognized by their headers; anything else is passed over."""
    found: dict[Path, FoundModel] = {}
    for program in programs:
        paths = [path for folder in program.model_folders(BASES[program.kind]) for path in sorted(folder.rglob("*"))]
        for path in paths:
            if path.suffix.lower() not in ENDINGS:
                continue
            try:
                known = recognize(path)
            except (UsageError, OSError):
                continue  # a LoRA, a VAE, a damaged file, a family that is not trained
            found.setdefault(path.resolve(), FoundModel(path, known.family, program))
    return list(found.values())


def is_program(kind: str, folder: Path) -> bool:
    """Whether a folder is a program's own, not just one of that name."""
    try:
        has_models = any((folder / "models" / name).is_dir() for name in (LORAS[kind], BASES[kind][0]))
        return has_models and any((folder / name).exists() for name in OWN_FILES[kind])
    except OSError:
        return False


def _extra_model_paths(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The folders of `names` in ComfyUI's extra_model_paths.yaml; none where it is missing or cannot be read."""
    path = folder / "extra_model_paths.yaml"
    try:
        if path.stat().st_size > MOST_YAML_BYTES:
            return []
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    found = []
    for section in document.values() if isinstance(document, dict) else ():
        if not isinstance(section, dict):
            continue
        base = folder / str(section.get("base_path") or "")
        lines = [line.strip() for name in names for line in str(section.get(name) or "").splitlines()]
        found += [base / line for line in lines if line]
    return found
