# SPDX-License-Identifier: Apache-2.0
"""Which platform class to activate, for the hardware found and the platform asked for.

vLLM and vLLM-Omni log an exception of a platform plugin at debug level and go on without the plugin. So a
command calls `check_platform_request` before it starts anything, where the error reaches the user; the
functions for the plugins log the same error once and answer as if omni-ep were not there.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.metadata import entry_points

from omni_ep.errors import ConfigurationError
from omni_ep.platforms.detection import detected_accelerators, hidden_accelerators, hiding_variable

logger = logging.getLogger(__name__)

REQUEST_VARIABLE = "OMNI_EP_PLATFORM"
PLATFORM_ENTRY_POINT_GROUP = "omni_ep.platforms"

CPU_PLATFORM = "omni_ep.platforms.cpu.platform.CpuOmniPlatform"
ACCELERATOR_PLATFORMS: Mapping[str, str] = {
    "cuda": "omni_ep.platforms.gpu.cuda.CudaOmniPlatform",
    "rocm": "omni_ep.platforms.gpu.rocm.RocmOmniPlatform",
    "npu": "omni_ep.platforms.npu.platform.NpuOmniPlatform",
}

_PLUGIN_NAME = "omni_ep"
_RESERVED = ("auto", "none", "cpu", *ACCELERATOR_PLATFORMS)

PlatformFinder = Callable[[], str | None]
"""A third party's: the dotted path of its platform class, or None where its hardware is absent."""


def select_platform(
    request: str,
    hardware: Collection[str],
    *,
    third_party: Mapping[str, PlatformFinder] | None = None,
    hidden: Collection[str] = (),
    rival_omni_plugins: Collection[str] = (),
    rival_vllm_plugins: Collection[str] = (),
) -> str | None:
    """The dotted path of the platform class to activate; None leaves vLLM-Omni's own choice in place.

    1. `none`: None.
    2. A name nobody knows: error with the known ones.
    3. A third party's name: its class; error where it says that its hardware is absent.
    4. `cpu`: our CPU class; error if an accelerator is visible, or if another plugin gives vLLM its platform.
    5. `cuda`, `rocm`, `npu`: our class for it; error if it was not found.
    6. `auto`, and another vLLM-Omni platform plugin is active: None, since only one may be.
    7. `auto`, one accelerator for which we have a class: that class. Two: None, vLLM-Omni reports it.
    8. `auto`, a third party finds its hardware: its class. Two of them: error, the user must choose.
    9. `auto`, another accelerator (xpu, musa, tpu) or another package's vLLM platform plugin: None.
    10. `auto`, nothing found: our CPU class.

    Args:
        request: the value of `OMNI_EP_PLATFORM`; empty means `auto`.
        hardware: keys of the accelerators found.
        third_party: what `omni_ep.platforms` entry points offer, by name.
        hidden: accelerators that this process may not use. They give way to an explicit `cpu`, and only to
            that: under `auto` a process without a device of its own keeps the platform of the machine.
        rival_omni_plugins: other packages' vLLM-Omni platform plugins that are active.
        rival_vllm_plugins: other packages' vLLM platform plugins that are active.
    """
    third_party = third_party or {}
    request = request.strip().lower() or "auto"
    found = ", ".join(sorted(hardware)) or "none"

    if request == "none":
        return None
    if request in third_party:
        return _third_party_class(request, third_party[request], found)
    if request not in _RESERVED:
        known = ", ".join([*_RESERVED, *sorted(third_party)])
        raise ConfigurationError(
            f"{REQUEST_VARIABLE}={request!r} is not a platform that omni-ep knows. Known: {known}. Correct "
            f"it, unset it, or install a package that registers {request!r} in entry-point group "
            f"{PLATFORM_ENTRY_POINT_GROUP!r}."
        )
    if request == "cpu":
        _require_cpu_possible(sorted(set(hardware) - set(hidden)), sorted(rival_vllm_plugins))
        return CPU_PLATFORM
    if request in ACCELERATOR_PLATFORMS:
        if request not in hardware:
            raise ConfigurationError(
                f"{REQUEST_VARIABLE}={request} asks for a {request} accelerator, but none was found "
                f"(accelerators found: {found}). Check its driver, or unset {REQUEST_VARIABLE} to use what "
                f"is there."
            )
        return ACCELERATOR_PLATFORMS[request]
    if rival_omni_plugins:
        return None
    ours = [name for name in ACCELERATOR_PLATFORMS if name in hardware]
    if ours:
        return ACCELERATOR_PLATFORMS[ours[0]] if len(ours) == 1 else None
    offers = {name: path for name, find in third_party.items() if (path := _call(name, find)) is not None}
    if len(offers) > 1:
        names = sorted(offers)
        raise ConfigurationError(
            f"several platforms registered in {PLATFORM_ENTRY_POINT_GROUP!r} found their hardware: "
            f"{', '.join(names)}. Only one can be active: set {REQUEST_VARIABLE}={names[0]}, for example."
        )
    if offers:
        return next(iter(offers.values()))
    return None if hardware or rival_vllm_plugins else CPU_PLATFORM


def check_platform_request() -> str | None:
    """What `OMNI_EP_PLATFORM` selects on this machine. For commands, before any worker starts.

    Raises:
        ConfigurationError: the request cannot be met, or VLLM_PLUGINS keeps omni-ep's plugins from running.
    """
    if not _allowed(_PLUGIN_NAME):
        raise ConfigurationError(
            f"VLLM_PLUGINS={os.environ['VLLM_PLUGINS']!r} keeps omni-ep's plugins from running. Add "
            f"{_PLUGIN_NAME!r} to it, or unset it."
        )
    return _select_here(detected_accelerators())


def omni_platform_qualname() -> str | None:
    """For the vLLM-Omni platform plugin: the class to activate, or None. Never raises ConfigurationError."""
    try:
        return _select_here(detected_accelerators() | _reported_by_vllm_omni())
    except ConfigurationError as error:
        _log_error_once(str(error))
        return None


def cpu_platform_requested_and_possible() -> bool:
    """For the vLLM platform plugin: whether vLLM, too, has to run on omni-ep's CPU platform.

    Imports neither vLLM nor vLLM-Omni: vLLM is resolving its platform while this runs.
    """
    try:
        return _select_here(detected_accelerators()) == CPU_PLATFORM
    except ConfigurationError as error:
        _log_error_once(str(error))
        return False


def third_party_platforms() -> dict[str, PlatformFinder]:
    """Platform key → finder, for every entry point of the group. Calling a finder imports its package."""
    finders: dict[str, PlatformFinder] = {}
    for entry in entry_points(group=PLATFORM_ENTRY_POINT_GROUP):
        name = entry.name.lower()
        if name in _RESERVED or name in finders:
            raise ConfigurationError(
                f"entry point {entry.name} = {entry.value} in group {PLATFORM_ENTRY_POINT_GROUP!r} has a "
                f"name that is taken ({', '.join([*_RESERVED, *finders])}). Rename it, or uninstall its "
                f"package."
            )
        finders[name] = lambda entry=entry: entry.load()()  # type: ignore[misc]
    return finders


def _select_here(hardware: Collection[str]) -> str | None:
    return select_platform(
        os.environ.get(REQUEST_VARIABLE, "auto"),
        hardware,
        third_party=third_party_platforms(),
        hidden=hidden_accelerators(),
        rival_omni_plugins=_active_rivals("vllm_omni.platform_plugins"),
        rival_vllm_plugins=_active_rivals("vllm.platform_plugins"),
    )


def _reported_by_vllm_omni() -> frozenset[str]:
    from vllm_omni.platforms import builtin_omni_platform_plugins

    return frozenset(name for name, detect in builtin_omni_platform_plugins.items() if detect() is not None)


def _active_rivals(group: str) -> list[str]:
    """Names of other packages' platform plugins that would activate a class. vLLM accepts one per group."""
    active = []
    for entry in entry_points(group=group):
        if entry.name == _PLUGIN_NAME or not _allowed(entry.name):
            continue
        try:
            if entry.load()() is not None:
                active.append(entry.name)
        except Exception as error:
            # vLLM skips a plugin that fails, so it is no rival.
            logger.debug("platform plugin %s of group %s failed: %s", entry.name, group, error)
    return active


def _allowed(plugin: str) -> bool:
    allowed = os.environ.get("VLLM_PLUGINS")
    return allowed is None or plugin in allowed.split(",")


def _require_cpu_possible(visible: list[str], rivals: list[str]) -> None:
    if visible:
        hide = " and ".join(f"{hiding_variable(name)}=''" for name in visible)
        raise ConfigurationError(
            f"{REQUEST_VARIABLE}=cpu asks for the CPU platform, but this machine has an accelerator: "
            f"{', '.join(visible)}. Unset {REQUEST_VARIABLE} to use it, or hide the device with {hide}."
        )
    if rivals:
        raise ConfigurationError(
            f"{REQUEST_VARIABLE}=cpu asks for the CPU platform, but the plugin {', '.join(rivals)} already "
            f"gives vLLM its platform. Unset {REQUEST_VARIABLE}, or let only omni-ep's plugins run with "
            f"VLLM_PLUGINS={_PLUGIN_NAME}."
        )


def _third_party_class(name: str, find: PlatformFinder, found: str) -> str:
    path = _call(name, find)
    if path is None:
        raise ConfigurationError(
            f"{REQUEST_VARIABLE}={name}: the package that registers {name!r} in "
            f"{PLATFORM_ENTRY_POINT_GROUP!r} says that its hardware is absent (accelerators found: {found}). "
            f"Check its driver, or unset {REQUEST_VARIABLE}."
        )
    return path


def _call(name: str, find: PlatformFinder) -> str | None:
    try:
        return find()
    except Exception as error:
        raise ConfigurationError(
            f"platform {name!r} of entry-point group {PLATFORM_ENTRY_POINT_GROUP!r} failed while it looked "
            f"for its hardware: {type(error).__name__}: {error}. Correct or uninstall its package."
        ) from error


@cache
def _log_error_once(message: str) -> None:
    logger.error("omni-ep activates no platform: %s", message)
