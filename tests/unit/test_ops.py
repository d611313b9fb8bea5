# SPDX-License-Identifier: Apache-2.0
"""The op factory, with stand-ins for the platform and for the groups."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from omni_ep.errors import ConfigurationError
from omni_ep.ops import HUNYUAN_FUSED_MOE, registered_ops, resolve_op
from omni_ep.platforms.interface import ExpertParallelPlatform


def install_distribution(root: Path, name: str, entry_points: str, module: str = "") -> None:
    """A throw-away installed distribution: metadata and one module, as pip would leave them."""
    info = root / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)
    (root / f"{name}.py").write_text(module)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


class StockPlatform:
    calls: list[tuple[str, dict[str, Any]]]

    @classmethod
    def prepare_diffusion_op_runtime(cls, op_name: str, **kwargs: Any) -> None:
        cls.calls.append((op_name, kwargs))


class ToyPlatform(ExpertParallelPlatform, StockPlatform):
    omni_ep_platform = "toy"
    diffusion_op_impls = {HUNYUAN_FUSED_MOE: "collections.OrderedDict"}  # noqa: RUF012


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was prepared, in order: stock preparation as (op, kwargs), groups as 'groups'."""
    log: list[Any] = []
    StockPlatform.calls = log
    groups: Any = ModuleType("omni_ep.groups")
    groups.prepare_expert_parallel = lambda: log.append("groups")
    monkeypatch.setitem(sys.modules, "omni_ep.groups", groups)
    return log


@pytest.fixture
def set_platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    import vllm.utils.import_utils  # noqa: F401  imported before its plugin sees the stand-in below

    def use(platform: object) -> None:
        platforms: Any = ModuleType("vllm_omni.platforms")
        platforms.current_omni_platform = platform
        monkeypatch.setitem(sys.modules, "vllm_omni", ModuleType("vllm_omni"))
        monkeypatch.setitem(sys.modules, "vllm_omni.platforms", platforms)

    return use


def test_op_resolves_after_its_groups_are_made(calls: list[Any], set_platform: Any) -> None:
    from collections import OrderedDict

    set_platform(ToyPlatform())
    assert resolve_op(HUNYUAN_FUSED_MOE) is OrderedDict
    assert calls == [(HUNYUAN_FUSED_MOE, {}), "groups"]


def test_foreign_op_reaches_vllm_omni_untouched_and_makes_no_groups(calls: list[Any]) -> None:
    ToyPlatform.prepare_diffusion_op_runtime("fused_moe", extra=3)
    assert calls == [("fused_moe", {"extra": 3})]


def test_unknown_op_names_op_platform_and_known_ops(calls: list[Any], set_platform: Any) -> None:
    set_platform(ToyPlatform())
    with pytest.raises(ConfigurationError) as error:
        resolve_op("warp_drive")
    assert str(error.value) == (
        "platform 'toy' has no implementation of op 'warp_drive'. Known ops: hunyuan_fused_moe. Correct the "
        "name, or install a package that registers 'toy.warp_drive' in entry-point group "
        "'omni_ep.diffusion_ops'."
    )
    assert "groups" not in calls


def test_stock_platform_error_says_how_to_activate_omni_ep(calls: list[Any], set_platform: Any) -> None:
    set_platform(StockPlatform())
    with pytest.raises(ConfigurationError) as error:
        resolve_op(HUNYUAN_FUSED_MOE)
    text = str(error.value)
    assert f"the active one is {StockPlatform.__module__}.StockPlatform" in text
    assert "omni-ep knows the ops hunyuan_fused_moe" in text
    assert "if VLLM_PLUGINS is set, add 'omni_ep' to it" in text
    assert "unset OMNI_EP_PLATFORM if it is 'none'" in text
    assert calls == []


def test_third_party_op_is_found_and_resolved(site: Path, calls: list[Any], set_platform: Any) -> None:
    install_distribution(
        site, "acme_ops", "[omni_ep.diffusion_ops]\ntoy.acme_moe = acme_ops:AcmeMoE\n", "class AcmeMoE: ...\n"
    )
    assert registered_ops("toy") == {"acme_moe": "acme_ops.AcmeMoE"}
    assert "acme_ops" not in sys.modules
    assert registered_ops("cuda") == {}
    set_platform(ToyPlatform())
    assert resolve_op("acme_moe").__name__ == "AcmeMoE"
    assert calls == [("acme_moe", {}), "groups"]
    assert ToyPlatform.known_diffusion_ops() == {"acme_moe", HUNYUAN_FUSED_MOE}
    sys.modules.pop("acme_ops")


@pytest.mark.parametrize(
    ("entries", "winner"),
    [
        ("any.hunyuan_fused_moe = acme_any:A", "collections.OrderedDict"),
        ("toy.hunyuan_fused_moe = acme_any:B", "acme_any.B"),
        ("any.hunyuan_fused_moe = acme_any:A\ntoy.hunyuan_fused_moe = acme_any:B", "acme_any.B"),
    ],
)
def test_only_an_entry_that_names_the_platform_overrides_its_own_op(
    site: Path, entries: str, winner: str
) -> None:
    install_distribution(site, "acme_any", f"[omni_ep.diffusion_ops]\n{entries}\n")
    assert ToyPlatform.get_diffusion_model_impl_qualname(HUNYUAN_FUSED_MOE) == winner


def test_any_platform_entry_fills_a_gap(site: Path) -> None:
    install_distribution(site, "acme_gap", "[omni_ep.diffusion_ops]\nany.new_op = acme_gap:New\n")
    assert ToyPlatform.get_diffusion_model_impl_qualname("new_op") == "acme_gap.New"


def test_two_packages_with_one_op_are_both_named(site: Path) -> None:
    install_distribution(site, "acme_one", "[omni_ep.diffusion_ops]\ntoy.moe = acme_one:Moe\n")
    install_distribution(site, "acme_two", "[omni_ep.diffusion_ops]\ntoy.moe = acme_two:Moe\n")
    with pytest.raises(ConfigurationError, match="registered twice") as error:
        registered_ops("toy")
    assert "acme_one 1.0" in str(error.value)
    assert "acme_two 1.0" in str(error.value)


@pytest.mark.parametrize(
    ("entry", "needed"),
    [
        ("moe = acme_bad:Moe", "needed '<platform>.<op>'"),
        ("toy.moe = acme_bad", "needed 'package.module:Class'"),
    ],
)
def test_malformed_entry_names_its_package(site: Path, entry: str, needed: str) -> None:
    install_distribution(site, "acme_bad", f"[omni_ep.diffusion_ops]\n{entry}\n")
    with pytest.raises(ConfigurationError) as error:
        registered_ops("toy")
    assert needed in str(error.value)
    assert "acme_bad 1.0" in str(error.value)


def test_implementation_that_cannot_be_imported(site: Path, calls: list[Any], set_platform: Any) -> None:
    install_distribution(site, "acme_gone", "[omni_ep.diffusion_ops]\ntoy.moe = acme_gone_missing:Moe\n")
    set_platform(ToyPlatform())
    with pytest.raises(
        ConfigurationError, match=r"op 'moe' is implemented by acme_gone_missing\.Moe on platform ToyP"
    ):
        resolve_op("moe")
