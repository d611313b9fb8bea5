# SPDX-License-Identifier: Apache-2.0
"""Environment of every test: one thread per rank, quiet engines, imports started early."""

import logging
import os
import signal

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

# A shell that starts the tests in the background has them, and what they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first, so that a mistake shows before the engines start."""
    order = ("/unit/", "/distributed/", "/e2e/")
    items.sort(key=lambda item: next((i for i, part in enumerate(order) if part in str(item.path)), 0))
    if any("/unit/" not in str(item.path) for item in items):
        from omni_ep.platforms.cpu import forkserver

        # The process that all ranks are forked from imports while the unit tests run.
        forkserver.start()
