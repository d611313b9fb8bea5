# SPDX-License-Identifier: Apache-2.0
"""Which accelerators this machine has, asked cheaply.

vLLM-Omni's detectors live in a package whose import resolves vLLM's platform, so a vLLM platform plugin
cannot call them. These probes answer the same question without importing vLLM or vLLM-Omni, and torch only
where a driver or a package of the vendor is found. They also know what only vLLM's own detectors know
(Jetson, ROCm under WSL, TPU): a CPU platform must never displace an accelerator that vLLM would have used.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

_HIDING_VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
    "xpu": ("ZE_AFFINITY_MASK",),
    "musa": ("MUSA_VISIBLE_DEVICES",),
}


def accelerator_present() -> bool:
    return bool(detected_accelerators())


@cache
def detected_accelerators() -> frozenset[str]:
    """Keys of the accelerators found: cuda, rocm, npu, xpu, musa, tpu. Hidden ones are among them."""
    return frozenset(name for name, probe in _PROBES.items() if _ask(name, probe))


def hidden_accelerators() -> frozenset[str]:
    """Keys whose visible-devices variable is set to nothing (or to -1), so that no process may use them.

    Drivers still report such devices, and so do vLLM's detectors: a Ray driver without a GPU of its own
    relies on it.
    """
    return frozenset(
        name
        for name, variables in _HIDING_VARIABLES.items()
        if any(os.environ.get(variable, "0").strip() in ("", "-1") for variable in variables)
    )


def hiding_variable(name: str) -> str:
    """The variable that hides accelerator `name` from a process."""
    return _HIDING_VARIABLES.get(name, ("its visible-devices variable",))[0]


def _ask(name: str, probe: Callable[[], bool]) -> bool:
    try:
        return probe()
    except Exception as error:
        # A vendor's broken package means "not usable here", for vLLM-Omni's detectors as well.
        logger.debug("no %s accelerator: %s", name, error)
        return False


def _cuda() -> bool:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _jetson()
    if nvml.nvmlInit_v2() != 0:
        return _jetson()
    count = ctypes.c_uint(0)
    status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return status == 0 and count.value > 0


def _jetson() -> bool:
    return Path("/etc/nv_tegra_release").is_file() or Path("/sys/class/tegra-firmware").exists()


def _rocm() -> bool:
    if find_spec("amdsmi") is not None:
        import amdsmi

        amdsmi.amdsmi_init()
        try:
            if len(amdsmi.amdsmi_get_processor_handles()) > 0:
                return True
        finally:
            amdsmi.amdsmi_shut_down()
    if not _wsl():
        return False
    import torch

    return bool(getattr(torch.version, "hip", None)) and torch.accelerator.is_available()


def _npu() -> bool:
    if find_spec("torch_npu") is None:
        return False
    import torch_npu

    return bool(torch_npu.npu.is_available())


def _xpu() -> bool:
    if not _wsl() and not any(Path("/dev/dri").glob("renderD*")):
        return False
    import torch

    return torch.xpu.is_available()


def _musa() -> bool:
    if find_spec("torchada") is None:
        return False
    import torchada

    return bool(torchada.is_musa_platform())


def _tpu() -> bool:
    pathways = "proxy" in os.environ.get("JAX_PLATFORMS", "").lower()
    return pathways or find_spec("libtpu") is not None


def _wsl() -> bool:
    return Path("/dev/dxg").exists()


_PROBES: dict[str, Callable[[], bool]] = {
    "cuda": _cuda,
    "rocm": _rocm,
    "npu": _npu,
    "xpu": _xpu,
    "musa": _musa,
    "tpu": _tpu,
}
