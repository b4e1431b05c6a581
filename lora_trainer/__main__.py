"""`python -m lora_trainer`: the same as the command `lora-trainer`."""

import signal
from collections.abc import Sequence

from lora_trainer.core.terminal import open_missing_streams


def entry(arguments: Sequence[str] | None = None) -> int:
    """Run the command of these arguments, by default this process's; its exit code.

    No signal does anything later. What the command hid from libraries is found again.
    """
    open_missing_streams()
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it loads, Ctrl-C ends it without a traceback
    from lora_trainer.core.imports import hide, importing, own_process

    own_process()
    with importing():
        from lora_trainer.cli.main import main
        from lora_trainer.core.interrupt import end_quickly, listening

    signal.signal(signal.SIGINT, before)
    try:
        with listening(to_the_end=True):
            code = main(arguments)
            end_quickly()
            return code
    finally:
        hide(())


if __name__ == "__main__":
    raise SystemExit(entry())
