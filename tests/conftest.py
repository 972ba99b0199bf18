"""Set before torch is imported: one thread per process, no busy waiting, no network for models."""

from __future__ import annotations

import logging
import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# Started in the background, a process ignores Ctrl-C and so would the commands the tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _quiet_logger() -> None:
    """Each test starts with the project's logger as an import leaves it; a script's main sets its level for good."""
    logger = logging.getLogger("pd_rerank")
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
