"""Silence libraries that log at import and while loading.

Standard library only; call it before torch, diffusers or transformers are imported.
"""

from __future__ import annotations

import logging
import os
import warnings

SETTINGS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "KINETO_LOG_LEVEL": "9",  # of torch.profiler, which prints when it starts and stops
}
# xformers reports how it was built, bitsandbytes which kernels are missing; this program checks both itself.
LOGGERS = ("xformers", "bitsandbytes", "torch.distributed.elastic.multiprocessing.redirects")


def quieten_libraries() -> None:
    """Lower the libraries' log levels; what the user set in the environment stays."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
