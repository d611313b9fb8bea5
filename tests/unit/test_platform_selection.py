# SPDX-License-Identifier: Apache-2.0
"""Which platform is chosen for which hardware and request, and that no error is lost."""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from omni_ep.errors import ConfigurationError
from omni_ep.platforms import detection, selection
from omni_ep.platforms.interface import (
    accelerator_present,
    check_platform_request,
    cpu_platform_requested_and_possible,
    omni_platform_qualname,
    select_platform,
)

CPU = "omni_ep.platforms.cpu.platform.CpuOmniPlatform"
CUDA = "omni_ep.platforms.gpu.cuda.CudaOmniPlatform"
ROCM = "omni_ep.platforms.gpu.rocm.RocmOmniPlatform"
NPU = "omni_ep.platforms.npu.platform.NpuOmniPlatform"
PRESENT = {"acme": lambda: "acme.Platform"}
ABSENT = {"acme": lambda: None}


@pytest.mark.parametrize(
    ("request_", "hardware", "third_party", "expected"),
    [
        ("none", [], {}, None),
        ("none", ["cuda"], {}, None),
        ("auto", [], {}, CPU),
        ("", [], {}, CPU),
        ("auto", ["cuda"], {}, CUDA),
        ("auto", ["rocm"], {}, ROCM),
        ("auto", ["npu"], {}, NPU),
        ("auto", ["xpu"], {}, None),
        ("auto", ["musa"], {}, None),
        ("auto", ["tpu"], {}, None),
        ("auto", ["cuda", "npu"], {}, None),
        ("npu", ["cuda", "npu"], {}, NPU),
        (" CUDA ", ["cuda"], {}, CUDA),
        ("cpu", [], {}, CPU),
        ("auto", ["xpu"], PRESENT, "acme.Platform"),
        ("auto", [], PRESENT, "acme.Platform"),
        ("auto", [], ABSENT, CPU),
        ("auto", ["cuda"], PRESENT, CUDA),
        ("acme", ["cuda"], PRESENT, "acme.Platform"),
    ],
)
def test_choice(request_: str, hardware: list[str], third_party: Any, expected: str | None) -> None:
    assert select_platform(request_, hardware, third_party=third_party) == expected


def test_cpu_asked_for_beside_a_gpu() -> None:
    with pytest.raises(ConfigurationError) as error:
        select_platform("cpu", ["cuda"])
    assert str(error.value) == (
        "OMNI_EP_PLATFORM=cpu asks for the CPU platform, but this machine has an accelerator: cuda. Unset "
        "OMNI_EP_PLATFORM to use it, or hide the device with CUDA_VISIBLE_DEVICES=''."
    )


def test_hidden_gpu_gives_way_to_an_explicit_cpu_only() -> None:
    assert select_platform("cpu", ["cuda"], hidden=["cuda"]) == CPU
    assert select_platform("auto", ["cuda"], hidden=["cuda"]) == CUDA


@pytest.mark.parametrize("name", ["cuda", "rocm", "npu"])
def test_accelerator_asked_for_and_absent(name: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        select_platform(name, ["xpu"])
    assert str(error.value) == (
        f"OMNI_EP_PLATFORM={name} asks for a {name} accelerator, but none was found (accelerators found: "
        f"xpu). Check its driver, or unset OMNI_EP_PLATFORM to use what is there."
    )


def test_unknown_platform_lists_the_known_ones() -> None:
    with pytest.raises(ConfigurationError) as error:
        select_platform("abacus", [], third_party=ABSENT)
    assert "OMNI_EP_PLATFORM='abacus' is not a platform that omni-ep knows." in str(error.value)
    assert "Known: auto, none, cpu, cuda, rocm, npu, acme." in str(error.value)


def test_third_party_asked_for_and_absent() -> None:
    with pytest.raises(ConfigurationError, match=r"OMNI_EP_PLATFORM=acme: .*its hardware is absent"):
        select_platform("acme", [], third_party=ABSENT)


def test_two_third_parties_need_a_choice() -> None:
    with pytest.raises(
        ConfigurationError, match=r"acme, beta\. Only one can be active: set OMNI_EP_PLATFORM=acme"
    ):
        select_platform("auto", [], third_party=PRESENT | {"beta": lambda: "beta.Platform"})


def test_third_party_that_fails_is_named() -> None:
    def broken() -> str | None:
        raise OSError("no driver")

    with pytest.raises(ConfigurationError, match=r"platform 'acme' .* failed .*OSError: no driver"):
        select_platform("auto", [], third_party={"acme": broken})


def test_other_packages_platform_plugins_are_not_displaced() -> None:
    assert select_platform("auto", ["cuda"], rival_omni_plugins=["acme"]) is None
    assert select_platform("auto", [], rival_vllm_plugins=["acme"]) is None
    assert select_platform("auto", ["npu"], rival_vllm_plugins=["ascend"]) == NPU
    with pytest.raises(ConfigurationError, match="the plugin acme already gives vLLM its platform"):
        select_platform("cpu", [], rival_vllm_plugins=["acme"])


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with the given accelerators, as both our probes and vLLM-Omni's detectors see it."""
    for variable in ("OMNI_EP_PLATFORM", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)

    def build(*hardware: str) -> None:
        monkeypatch.setattr(selection, "detected_accelerators", lambda: frozenset(hardware))
        monkeypatch.setattr(selection, "_reported_by_vllm_omni", lambda: frozenset(hardware))

    selection._log_error_once.cache_clear()
    return build


def test_plugin_functions_log_the_error_once_and_select_nothing(
    machine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine("cuda")
    monkeypatch.setenv("OMNI_EP_PLATFORM", "cpu")
    assert omni_platform_qualname() is None
    assert omni_platform_qualname() is None
    assert not cpu_platform_requested_and_possible()
    messages = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(messages) == 1
    assert (
        "OMNI_EP_PLATFORM=cpu asks for the CPU platform, but this machine has an accelerator" in messages[0]
    )


def test_command_gets_the_same_error_raised(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("cuda")
    monkeypatch.setenv("OMNI_EP_PLATFORM", "cpu")
    with pytest.raises(ConfigurationError, match="asks for the CPU platform"):
        check_platform_request()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_platform_request() == CPU


def test_both_plugins_agree(machine: Any) -> None:
    machine()
    assert omni_platform_qualname() == CPU
    assert cpu_platform_requested_and_possible()
    machine("cuda")
    assert omni_platform_qualname() == CUDA
    assert not cpu_platform_requested_and_possible()


@pytest.mark.parametrize("value", ["", "other", "other,another"])
def test_vllm_plugins_without_omni_ep(machine: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    machine()
    monkeypatch.setenv("VLLM_PLUGINS", value)
    with pytest.raises(
        ConfigurationError, match=f"VLLM_PLUGINS='{value}' keeps omni-ep's plugins from running"
    ):
        check_platform_request()
    monkeypatch.setenv("VLLM_PLUGINS", f"{value},omni_ep")
    assert check_platform_request() == CPU


def install_distribution(root: Path, name: str, entry_points: str, module: str) -> None:
    info = root / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (root / f"{name}.py").write_text(module)


def test_installed_third_party_platform(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    install_distribution(
        tmp_path,
        "acme_platform",
        "[omni_ep.platforms]\nacme = acme_platform:find\n",
        "def find():\n    return 'acme_platform.AcmeOmniPlatform'\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check_platform_request() == "acme_platform.AcmeOmniPlatform"
    assert omni_platform_qualname() == "acme_platform.AcmeOmniPlatform"
    assert not cpu_platform_requested_and_possible()


def test_third_party_may_not_take_a_reserved_name(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    install_distribution(tmp_path, "acme_thief", "[omni_ep.platforms]\ncuda = acme_thief:find\n", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"cuda = acme_thief:find .* has a name that is taken"):
        check_platform_request()


def test_installed_vllm_plugin_of_another_package(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    install_distribution(
        tmp_path,
        "acme_vllm",
        "[vllm.platform_plugins]\nacme = acme_vllm:find\n",
        "def find():\n    return 'acme_vllm.Platform'\n",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not cpu_platform_requested_and_possible()
    assert check_platform_request() is None
    monkeypatch.setenv("VLLM_PLUGINS", "omni_ep")
    assert check_platform_request() == CPU


class FakeNvml:
    """libnvidia-ml with a given number of devices; nvmlInit fails where `status` is not 0."""

    def __init__(self, devices: int, status: int = 0) -> None:
        self.devices, self.status = devices, status

    def nvmlInit_v2(self) -> int:
        return self.status

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = self.devices
        return 0


@pytest.mark.parametrize(
    ("nvml", "expected"),
    [(FakeNvml(2), True), (FakeNvml(0), False), (FakeNvml(1, status=9), False), (None, False)],
)
def test_nvidia_probe(nvml: FakeNvml | None, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> FakeNvml:
        assert name == "libnvidia-ml.so.1"
        if nvml is None:
            raise OSError(name)
        return nvml

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(detection, "_jetson", lambda: False)
    assert detection._cuda() is expected


def test_a_broken_vendor_package_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("driver mismatch")

    monkeypatch.setattr(detection, "_PROBES", {"rocm": broken, "cuda": lambda: True})
    detection.detected_accelerators.cache_clear()
    try:
        assert detection.detected_accelerators() == {"cuda"}
        assert accelerator_present()
    finally:
        detection.detected_accelerators.cache_clear()


@pytest.mark.parametrize(("value", "hidden"), [("", True), ("-1", True), ("0", False), (None, False)])
def test_hidden_devices(value: str | None, hidden: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert ("cuda" in detection.hidden_accelerators()) is hidden


def test_selection_imports_neither_vllm_nor_vllm_omni() -> None:
    """vLLM is resolving its platform when its plugin runs: touching it again would recurse."""
    code = (
        "import sys; from omni_ep.platforms.interface import cpu_platform_requested_and_possible as f; f(); "
        "print([m for m in ('vllm', 'vllm_omni') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
