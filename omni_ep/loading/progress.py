# SPDX-License-Identifier: Apache-2.0
"""One bar for a load, in bytes with the rate, drawn by the first rank."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def loading_bar(total: int, *, enabled: bool) -> Iterator[Callable[[int], object]]:
    """A function that is told how many bytes were just read; ``total`` is what will be read."""
    if not enabled:
        yield lambda count: None
        return
    # The worker's sys.stderr prefixes every write with a process name, which tears a bar apart.
    with (
        os.fdopen(os.dup(2), "w") as terminal,
        tqdm(
            total=total,
            desc="loading (rank 0)",
            unit="B",
            unit_scale=True,
            file=terminal,
            dynamic_ncols=True,
            mininterval=0.2,
        ) as bar,
    ):
        yield bar.update
