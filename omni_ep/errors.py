# SPDX-License-Identifier: Apache-2.0
"""The one exception that is meant for a person rather than for a developer.

It lives alone so that every module of the core can raise it without importing another one.
"""


class ConfigurationError(ValueError):
    """What the user asked for cannot run.

    The text is one sentence that names the value found, the value needed and the fix. Commands print it
    without a traceback and exit with code 2.
    """
