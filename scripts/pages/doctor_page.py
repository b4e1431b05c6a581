"""Write `docs/environment.md` from the table of variables, and the planted faults of `docs/doctor.md` from the tests."""

from __future__ import annotations

import sys
from pathlib import Path

from lora_trainer.doctor.variables import environment_page

CHECKOUT = Path(__file__).resolve().parents[2]
DOCTOR, ENVIRONMENT = CHECKOUT / "docs" / "doctor.md", CHECKOUT / "docs" / "environment.md"
FAULTS = "## Planted faults\n"
ABOUT_FAULTS = """
Tests plant each of these faults and compare the line. *facts*: the machine is stated as data, since no GPU was at hand; the others
are planted for real. FOLDER is the test's own.

"""
INTRODUCTION = """# Environment variables

This page lists the environment variables that change what a run does, when to set each, and what lora-trainer sets by itself.

```
lora-trainer doctor
```

`doctor` shows those that are set, and what is wrong with their values ([doctor.md](doctor.md)). A value that you set always wins over
lora-trainer's own. Settings of the config are better than variables where both exist: a run records its settings, not its
environment.

Written by `scripts/write_docs.py` from the table in `lora_trainer/doctor/variables.py`; edit that, not this page.

"""


def environment_document() -> str:
    """docs/environment.md."""
    return INTRODUCTION + environment_page().rstrip() + "\n"


def doctor_document(current: str) -> str:
    """docs/doctor.md, with the table of faults written again."""
    sys.path.insert(0, str(CHECKOUT))  # the faults are those of the tests
    from tests.doctor.planted import fault_table

    return f"{current.partition(FAULTS)[0]}{FAULTS}{ABOUT_FAULTS}{fault_table()}\n"
