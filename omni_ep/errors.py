# SPDX-License-Identifier: Apache-2.0
"""Exceptions that are meant for a person rather than for a developer.

They live alone so that every module can raise them without importing another one.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class ConfigurationError(ValueError):
    """What the user asked for cannot run.

    The text is one sentence that names the value found, the value needed and the fix. Commands print it
    without a traceback and exit with code 2.
    """


class WorkerStartError(RuntimeError):
    """A rank failed before it was ready; the text says which, and its own reason."""


@contextmanager
def malformed(what: str) -> Iterator[None]:
    """Turn the errors that values of a wrong type or a missing key cause into a ``ConfigurationError``.

    Args:
        what: the file that holds the values, for the sentence.
    """
    try:
        yield
    except ConfigurationError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise ConfigurationError(
            f"{what} is malformed ({type(error).__name__}: {error}); use the one that belongs to the model"
        ) from error
