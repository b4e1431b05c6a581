"""What is hidden from libraries, and where: whole processes, since nothing hidden comes back in one."""

import gc
import subprocess
import sys

import pytest
import torch

from lora_trainer.config.schema import Config
from lora_trainer.core.imports import OPTIONAL, hide, importing
from lora_trainer.production import libraries

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


def test_in_an_own_process_what_is_hidden_is_not_found_and_what_is_imported_stays():
    done = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "hidden, and found again", done.stderr


def test_in_a_process_of_others_nothing_is_hidden():
    hide(["wave"])
    import wave

    assert wave is not None


@pytest.mark.parametrize(
    ("settings", "card", "seen"),
    [
        ({}, False, set()),
        ({}, True, {"xformers"}),
        ({"memory": {"attention": "sdpa"}}, True, set()),
        ({"memory": {"attention": "xformers"}}, False, set()),
        ({"optim": {"name": "paged_adamw8bit"}}, False, {"bitsandbytes"}),
        ({"memory": {"base_precision": "nf4"}}, False, {"bitsandbytes"}),
        ({"memory": {"base_precision": "int8"}}, False, set()),
    ],
)
def test_what_a_run_may_use_stays_visible(monkeypatch, settings, card, seen):
    found = []
    monkeypatch.setattr(libraries, "hide", found.extend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card)
    libraries.import_libraries(Config.model_validate(settings))
    assert set(OPTIONAL) - set(found) == seen


def test_garbage_is_looked_for_again_after_imports():
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
