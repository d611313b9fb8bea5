# SPDX-License-Identifier: Apache-2.0
"""Imports run one way, models -> platforms -> core, and the arithmetic of the core needs no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = (
    *("errors", "geometry", "layout", "placement", "config", "units", "layout_names"),
    *("planner", "planner.cost", "planner.diagram", "planner.enumerate", "planner.report", "planner.rules"),
    *("loading", "loading.completeness"),
)


def imported(source: str, package: str, *, inside_functions: bool = True) -> Iterator[str]:
    """Dotted names a module imports; relative ones are resolved against ``package``."""
    tree = ast.parse(source)
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)


# Entry points put the layers together when vLLM calls them, so inside their functions they may reach down.
ENTRY_POINTS = "omni_ep/plugin.py"


def offenders(folder: str, package: str, forbidden: tuple[str, ...]) -> list[str]:
    found = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        inside = ".".join([package, *file.relative_to(ROOT / folder).parent.parts])
        anywhere = str(file.relative_to(ROOT)) != ENTRY_POINTS
        for name in imported(file.read_text(encoding="utf-8"), inside, inside_functions=anywhere):
            if any(name == entry or name.startswith(f"{entry}.") for entry in forbidden):
                found.append(f"{file.relative_to(ROOT)} imports {name}")
    return found


def test_core_imports_neither_models_nor_platforms() -> None:
    assert offenders("omni_ep", "omni_ep", ("omni_ep.models", "omni_ep.platforms")) == []


def test_platforms_do_not_import_models() -> None:
    assert offenders("platforms", "omni_ep.platforms", ("omni_ep.models",)) == []


@pytest.mark.parametrize(
    ("source", "package"),
    [
        ("import omni_ep.models", "omni_ep"),
        ("from omni_ep.models.x import y", "omni_ep"),
        ("from omni_ep import models", "omni_ep"),
        ("from . import models", "omni_ep"),
        ("from .models import x", "omni_ep"),
        ("from ..models import x", "omni_ep.platforms"),
        ("def f():\n    from ...models import x", "omni_ep.platforms.cpu"),
    ],
)
def test_the_rule_sees_every_spelling(source: str, package: str) -> None:
    assert any(name.startswith("omni_ep.models") for name in imported(source, package))


def test_pure_modules_import_no_torch() -> None:
    program = f"""
import sys
for name in {PURE!r}:
    __import__("omni_ep." + name)
print(sorted({{"torch", "vllm", "vllm_omni", "numpy", "PIL", "skimage"}} & set(sys.modules)))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


def test_quality_imports_scikit_image_only_when_used() -> None:
    program = "import sys, omni_ep.quality; print(sorted({'torch', 'vllm', 'skimage'} & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"
