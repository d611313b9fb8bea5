# SPDX-License-Identifier: Apache-2.0
"""One module per subcommand of `omni-ep`, each with `add_parser(subparsers)`."""
