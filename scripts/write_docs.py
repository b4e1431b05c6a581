"""Write the pages of docs/ that come from code: settings, commands, imports, environment, faults, presets' evidence, plans.

    python scripts/write_docs.py
    python scripts/write_docs.py --check

`make format` writes them. `make check` runs `--check`, which writes nothing and ends with 1 where a page differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.core.io import write_text
from lora_trainer.run.plans.page import plans_page
from pages.cli_page import cli_page
from pages.config_page import config_page
from pages.doctor_page import doctor_document, environment_document
from pages.import_page import import_page
from pages.presets_page import presets_page

if TYPE_CHECKING:
    from collections.abc import Callable

DOCS = Path(__file__).resolve().parents[1] / "docs"
# Each takes the page as it is: some have a part that is written by hand.
PAGES: dict[str, Callable[[str], str]] = {
    "cli.md": lambda page: cli_page(),
    "config.md": lambda page: config_page(),
    "doctor.md": doctor_document,
    "environment.md": lambda page: environment_document(),
    "import.md": lambda page: import_page(),
    "plans.md": lambda page: plans_page(),
    "presets.md": presets_page,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 where a page differs")
    only_checks = parser.parse_args().check
    differing = []
    for name, make in PAGES.items():
        path = DOCS / name
        page = path.read_text("utf-8")
        if (made := make(page)) == page:
            continue
        differing.append(name)
        if not only_checks:
            write_text(path, made)
    if differing and only_checks:
        print(f"docs differ from the code: {', '.join(differing)}. Run: make format", file=sys.stderr)
        return 1
    for name in differing:
        print(f"docs/{name}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
