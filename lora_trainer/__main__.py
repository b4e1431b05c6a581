"""`python -m lora_trainer`: the same as the command `lora-trainer`."""

import signal


def entry() -> int:
    """Run the command of this process's arguments; its exit code."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it loads, Ctrl-C ends it without a traceback
    from lora_trainer.cli.main import main

    signal.signal(signal.SIGINT, before)
    return main()


if __name__ == "__main__":
    raise SystemExit(entry())
