# SPDX-License-Identifier: Apache-2.0
"""One process imports vLLM-Omni; every CPU rank is forked from it.

Importing vLLM-Omni takes some 20 s, and upstream starts every rank with the spawn method, which
pays it again in each of them. A fork server pays it once, and beside the parent's own imports
when it is started early. Importing this module costs nothing, so that commands can do that.

Forking is safe here because the server has imported but never computed: it runs one thread
and has touched no accelerator. :func:`check_single_threaded` watches over that.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

PRELOADED_MODULE = "omni_ep.platforms.cpu.preload"


def context() -> ForkServerContext:
    """The multiprocessing context whose processes are forked from the preloaded server."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([PRELOADED_MODULE])
    return server


def start() -> None:
    """Start the server now and return at once; it imports while the caller does other work.

    The environment of this moment is the server's; ranks receive their parent's when they start.
    """
    # More than one OpenMP thread in the server would make forking unsafe.
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    context()
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ["OMP_NUM_THREADS"] = threads


def check_single_threaded() -> None:
    """Called in the server when its imports are done; complains if one of them started a thread."""
    count = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    if count > 1:
        print(
            f"omni-ep: an import started {count - 1} thread(s) in the fork server; "
            "ranks forked from it may hang",
            file=sys.stderr,
        )
