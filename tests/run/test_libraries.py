"""Which libraries are hidden, and where. In whole processes, as hiding cannot be undone in one."""

import gc
import subprocess
import sys

import pytest
import torch

from lora_trainer.config.schema import Config
from lora_trainer.core.imports import OPTIONAL, hide, importing
from lora_trainer.run import libraries

HIDDEN = """
import importlib.util
from lora_trainer.core.imports import hide, own_process
own_process()
import json
hide(["json", "wave"])
assert importlib.util.find_spec("json") and json.dumps(1)
assert importlib.util.find_spec("wave") is None
try:
    import wave
except ImportError:
    hide(["json"])
    import wave
    print("hidden, and found again")
"""


def test_in_its_own_process_hidden_libraries_are_not_found_and_imported_ones_stay():
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "hidden, and found again", done.stderr


def test_in_another_programs_process_nothing_is_hidden():
    hide(["wave"])
    import wave

    assert wave is not None


IN_A_SESSION = """
import runpy, sys
{before}
sys.argv = ["lora-trainer", "plan", "--json"]
try:
    runpy.run_module("lora_trainer", run_name="__main__")
except SystemExit as end:
    assert end.code == 0, end.code
import bitsandbytes
"""


WITH_A_BROKEN_ONE = """
import sys
sys.path.insert(0, sys.argv[1])
from lora_trainer.config.schema import Config
from lora_trainer.run.libraries import import_libraries
import_libraries(Config())
print("peft" in sys.modules)
"""


@pytest.mark.slow
def test_a_library_that_does_not_load_keeps_no_other_from_loading(tmp_path):
    """In another program's process, where nothing is hidden: peft and diffusers import what they find."""
    for name in OPTIONAL:
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('built for another torch')", encoding="utf-8")
    program = [sys.executable, "-c", WITH_A_BROKEN_ONE, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("before", ["", "import diffusers"])
def test_a_command_does_not_change_the_session_that_calls_it(before):
    program = [sys.executable, "-c", IN_A_SESSION.format(before=before)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("settings", "gpu", "seen"),
    [
        ({}, False, set()),
        ({}, True, {"xformers"}),
        ({"hardware": {"attention_backend": "sdpa"}}, True, set()),
        ({"hardware": {"attention_backend": "xformers"}}, False, set()),
        ({"optimizer": {"name": "paged_adamw8bit"}}, False, {"bitsandbytes"}),
        ({"memory": {"weight_dtype": "nf4"}}, False, {"bitsandbytes"}),
        ({"memory": {"weight_dtype": "int8"}}, False, set()),
    ],
)
def test_libraries_that_a_run_may_use_stay_visible(monkeypatch, settings, gpu, seen):
    found = []
    monkeypatch.setattr(libraries, "hide", found.extend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    libraries.import_libraries(Config.model_validate(settings))
    assert set(OPTIONAL) - set(found) == seen


def test_garbage_collection_is_enabled_again_after_imports():
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()


CHOSEN = """
import sys
import torch
from lora_trainer.config.layers import resolve
from lora_trainer.core.imports import own_process
own_process()
from lora_trainer.run.libraries import import_libraries
resolved = resolve([])
import_libraries(resolved.config)
assert sys.modules["bitsandbytes"] is None
from lora_trainer.models.families import FAMILIES
from lora_trainer.models.published import public_architecture
from lora_trainer.adapters.base import AdapterOptions
from lora_trainer.adapters.lora import inject_lora
from lora_trainer.models.quantization.store import make_quantizer, store_layers
from lora_trainer.run import choices
choices.cuda_memory_gib = lambda: 11.6
torch.cuda.is_bf16_supported = lambda **_: True
chosen = choices.choose(resolved, FAMILIES["flux"], public_architecture("flux"), torch.device("cuda"), 1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
store_layers(model, make_quantizer(chosen.precision.value))
parameters = inject_lora(model, ["0", "1"], AdapterOptions(2, 2.0), 0)
model(torch.randn(3, 64)).sum().backward()
assert all(each.grad is not None for each in parameters.values())
from diffusers.utils.import_utils import is_bitsandbytes_available
print(chosen.precision.value, type(model[0].base_layer).__name__, is_bitsandbytes_available())
"""


def test_a_backend_that_the_plan_chose_is_found_although_hidden():
    done = subprocess.run([sys.executable, "-c", CHOSEN], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["nf4", "Linear4", "False"], done.stderr
