# SPDX-License-Identifier: Apache-2.0
"""Whether a file can be written, asked before the work whose result goes into it."""

import os
from pathlib import Path

from omni_ep.errors import ConfigurationError


def check_writable(flag: str, file: Path) -> None:
    """Refuse a file that could not be saved later.

    Raises:
        ConfigurationError: it is a folder, or its folder is missing or belongs to someone else.
    """
    if file.is_dir() or not os.access(file.absolute().parent, os.W_OK):
        raise ConfigurationError(
            f"{flag} is {file}, which cannot be written; name a file in a folder that exists and is yours"
        )
