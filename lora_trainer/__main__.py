"""`python -m lora_trainer`: the same as the command `lora-trainer`."""

from lora_trainer.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
