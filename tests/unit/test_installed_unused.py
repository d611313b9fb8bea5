# SPDX-License-Identifier: Apache-2.0
"""Installed but unused, omni-ep leaves vLLM and vLLM-Omni as they are.

Each case is a fresh process: what other tests import or register must not show, nor hide anything.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

#: Every function, class and method that vLLM and vLLM-Omni hold, and what our plugins change of them.
REPORT = """
import inspect, json, sys
import vllm, vllm.platforms, vllm.config
from vllm.model_executor.custom_op import op_registry, op_registry_oot
import vllm.distributed.device_communicators.all2all, vllm.distributed.device_communicators.cpu_communicator
import vllm.model_executor.layers.activation
import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method
import vllm_omni.diffusion.executor.multiproc_executor, vllm_omni.diffusion.worker.diffusion_worker
import vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3
from vllm_omni.diffusion import registry
from vllm_omni.platforms import current_omni_platform
from transformers import CONFIG_MAPPING

def members():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if module is None or name.split(".")[0] not in ("vllm", "vllm_omni"):
            continue
        for attribute, value in list(vars(module).items()):
            if inspect.isfunction(value) or inspect.isclass(value):
                found[f"{name}.{attribute}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                for method, body in list(vars(value).items()):
                    if callable(body) or isinstance(body, (classmethod, staticmethod, property)):
                        found[f"{name}.{attribute}.{method}"] = body
    return found

def origin(value):
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return str(getattr(value, "__module__", ""))

def state():
    tables = {"oot layers": op_registry_oot, "layers": op_registry}
    for name, value in vars(registry).items():
        if isinstance(value, dict) and not name.startswith("__"):
            tables[name] = value
    tables["models"] = registry.DiffusionModelRegistry.models
    return {
        name: {str(key): repr(value) for key, value in table.items()} for name, table in tables.items()
    }

functions, tables = members(), state()
from vllm_omni.plugins import load_omni_general_plugins
load_omni_general_plugins()
later, tables_later = members(), state()
print("REPORT" + json.dumps({
    "members": len(functions),
    "loaded omni_ep": sorted(name for name in sys.modules if name.startswith("omni_ep")),
    "ours inside": sorted(name for name, value in later.items() if origin(value).startswith("omni_ep")),
    "replaced": sorted(name for name, value in functions.items() if later.get(name) is not value),
    "oot layers": sorted(op_registry_oot),
    "our configurations": sorted(
        name for name, config in CONFIG_MAPPING._extra_content.items() if origin(config).startswith("omni_ep")
    ),
    "tables": sorted(tables),
    "changed": {
        name: sorted({key for key, _ in tables[name].items() ^ table.items()})
        for name, table in tables_later.items() if tables[name] != table
    },
    "pipeline": list(registry._DIFFUSION_MODELS["HunyuanImage3ForCausalMM"]),
    "vllm": type(vllm.platforms.current_platform).__name__,
    "omni": type(current_omni_platform).__name__,
}))
"""


def report(**environment: str) -> dict[str, Any]:
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("VLLM_PLUGINS", "OMNI_EP_PLATFORM")
    }
    done = subprocess.run(
        [sys.executable, "-c", REPORT],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**inherited, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("REPORT"))
    result: dict[str, Any] = json.loads(line.removeprefix("REPORT"))
    return result


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    return report()


def test_the_report_sees_both_libraries(installed: dict[str, Any]) -> None:
    """Otherwise the tests below prove nothing."""
    assert installed["members"] > 10_000
    assert {"_DIFFUSION_MODELS", "_DIFFUSION_PRE_PROCESS_FUNCS", "models", "layers"} <= set(
        installed["tables"]
    )
    assert installed["vllm"] == "CpuVllmPlatform"
    assert installed["omni"] == "CpuOmniPlatform"


def test_the_only_entry_changed_is_the_pipeline(installed: dict[str, Any]) -> None:
    """In every table of vLLM-Omni's model registry and of vLLM's layers."""
    assert installed["changed"] == {
        "_DIFFUSION_MODELS": ["HunyuanImage3ForCausalMM"],
        "models": ["HunyuanImage3ForCausalMM"],
    }
    assert installed["pipeline"] == ["omni_ep.models.hunyuan_image3.pipeline", "", "HunyuanImage3Pipeline"]


def test_transformers_knows_no_configuration_more(installed: dict[str, Any]) -> None:
    """Registered for everybody, ours would take precedence over a class the user trusts."""
    assert installed["our configurations"] == []


def test_no_function_is_replaced(installed: dict[str, Any]) -> None:
    """Neither by the general plugins nor by choosing the platform; patches belong to CPU workers."""
    assert installed["replaced"] == []
    assert installed["ours inside"] == []


def test_no_layer_is_registered(installed: dict[str, Any]) -> None:
    assert installed["oot layers"] == []


def test_no_pipeline_is_imported(installed: dict[str, Any]) -> None:
    unused = ("pipeline", "patches", "precision", "moe", "denoising", "worker", "executor", "experts")
    assert [name for name in installed["loaded omni_ep"] if name.split(".")[-1] in unused] == []


def test_without_plugins_nothing_of_omni_ep_is_there() -> None:
    stock = report(VLLM_PLUGINS="")
    assert stock["loaded omni_ep"] == []
    assert stock["changed"] == {}
    assert stock["pipeline"][0] == "hunyuan_image3"
    assert (stock["vllm"], stock["omni"]) == ("UnspecifiedPlatform", "UnspecifiedOmniPlatform")


def test_platform_none_leaves_both_platforms_alone() -> None:
    stock = report(OMNI_EP_PLATFORM="none")
    assert (stock["vllm"], stock["omni"]) == ("UnspecifiedPlatform", "UnspecifiedOmniPlatform")
    assert stock["replaced"] == stock["ours inside"] == stock["oot layers"] == []
