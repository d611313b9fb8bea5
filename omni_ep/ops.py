# SPDX-License-Identifier: Apache-2.0
"""From an op's name to its implementation on the current platform.

A model asks for an op by name and never for a device. The platform that vLLM-Omni selected owns the answer;
packages other than omni-ep add answers through the entry-point group `omni_ep.diffusion_ops`.
"""

import re
from collections.abc import Collection
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from omni_ep.errors import ConfigurationError

HUNYUAN_FUSED_MOE = "hunyuan_fused_moe"
"""Routed and shared experts of one HunyuanImage-3.0 layer, dispatch and combine included."""

OMNI_EP_OPS = (HUNYUAN_FUSED_MOE,)
OP_ENTRY_POINT_GROUP = "omni_ep.diffusion_ops"
ANY_PLATFORM = "any"

_ENTRY_NAME = re.compile(r"(?P<platform>\w+)\.(?P<op>\w+)")
_ENTRY_VALUE = re.compile(r"(?P<module>[\w.]+)\s*:\s*(?P<attr>\w+)")


def resolve_op(op_name: str) -> Any:
    """The class or function that implements `op_name` on the current platform, its runtime prepared.

    Raises:
        ConfigurationError: the platform is not one of omni-ep's, does not know the op, or names an
            implementation that cannot be imported.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.platforms import current_omni_platform as platform

    if not hasattr(platform, "get_diffusion_model_impl_qualname"):
        raise _inactive_plugin_error(op_name, type(platform))
    platform.prepare_diffusion_op_runtime(op_name)
    qualname = platform.get_diffusion_model_impl_qualname(op_name)
    try:
        return resolve_obj_by_qualname(qualname)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"op {op_name!r} is implemented by {qualname} on platform {type(platform).__name__}, which "
            f"cannot be imported: {error}. Install what it needs, or correct the entry point in "
            f"{OP_ENTRY_POINT_GROUP!r}."
        ) from error


def registered_ops(platform_key: str) -> dict[str, str]:
    """Ops that installed packages offer for a platform: op name → dotted path. Imports none of them.

    An entry `<platform_key>.<op>` takes precedence over an entry `any.<op>`.

    Raises:
        ConfigurationError: an entry of the group is malformed, or two packages offer the same op for this
            platform.
    """
    found: dict[str, dict[str, EntryPoint]] = {platform_key: {}, ANY_PLATFORM: {}}
    for entry in entry_points(group=OP_ENTRY_POINT_GROUP):
        platform, op = _parse_name(entry)
        if platform not in found:
            continue
        rival = found[platform].get(op)
        if rival is not None and rival.value != entry.value:
            raise ConfigurationError(
                f"op {op!r} for platform {platform!r} is registered twice in entry-point group "
                f"{OP_ENTRY_POINT_GROUP!r}: {_describe(rival)} and {_describe(entry)}. Uninstall one of them."
            )
        found[platform][op] = entry
    entries = found[ANY_PLATFORM] | found[platform_key]
    return {op: _dotted_path(entry) for op, entry in entries.items()}


def platform_specific_ops(platform_key: str) -> frozenset[str]:
    """The registered ops whose entry names `platform_key` itself, not `any`."""
    names = (_parse_name(entry) for entry in entry_points(group=OP_ENTRY_POINT_GROUP))
    return frozenset(op for platform, op in names if platform == platform_key)


def unknown_op_error(op_name: str, platform_key: str, known: Collection[str]) -> ConfigurationError:
    return ConfigurationError(
        f"platform {platform_key!r} has no implementation of op {op_name!r}. Known ops: "
        f"{', '.join(sorted(known)) or 'none'}. Correct the name, or install a package that registers "
        f"'{platform_key}.{op_name}' in entry-point group {OP_ENTRY_POINT_GROUP!r}."
    )


def _inactive_plugin_error(op_name: str, active: type) -> ConfigurationError:
    return ConfigurationError(
        f"op {op_name!r} needs a platform of omni-ep, but the active one is "
        f"{active.__module__}.{active.__qualname__}. omni-ep knows the ops {', '.join(OMNI_EP_OPS)}. Let its "
        f"plugin run: if VLLM_PLUGINS is set, add 'omni_ep' to it; unset OMNI_EP_PLATFORM if it is 'none'; "
        f"and look in the log for why omni-ep selected no platform."
    )


def _parse_name(entry: EntryPoint) -> tuple[str, str]:
    match = _ENTRY_NAME.fullmatch(entry.name)
    if match is None:
        raise ConfigurationError(
            f"entry point {_describe(entry)} in group {OP_ENTRY_POINT_GROUP!r} is named {entry.name!r}; "
            f"needed '<platform>.<op>', such as 'cuda.{HUNYUAN_FUSED_MOE}'. Correct that package, or "
            f"uninstall it."
        )
    return match["platform"], match["op"]


def _dotted_path(entry: EntryPoint) -> str:
    match = _ENTRY_VALUE.fullmatch(entry.value)
    if match is None:
        raise ConfigurationError(
            f"entry point {_describe(entry)} in group {OP_ENTRY_POINT_GROUP!r} has the value "
            f"{entry.value!r}; needed 'package.module:Class'. Correct that package, or uninstall it."
        )
    return f"{match['module']}.{match['attr']}"


def _describe(entry: EntryPoint) -> str:
    owner = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
    return f"{entry.name} = {entry.value}{owner}"
