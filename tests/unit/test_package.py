# SPDX-License-Identifier: Apache-2.0
"""The wheel holds what the editable install imports, and works alone."""

import email
import os
import shutil
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: repository folder → where its modules land in the wheel.
FOLDERS = {"omni_ep": "omni_ep", "platforms": "omni_ep/platforms", "models": "omni_ep/models"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that must succeed, without this test's own import paths."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=600, env={**inherited, **environment}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the build tools of this environment: a checkout stays clean, no network."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, cwd=source)
    (built,) = output.glob("omni_ep-*-py3-none-any.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own, by whichever installer is here."""
    target = tmp_path_factory.mktemp("installed")
    has_pip = subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0
    uv = shutil.which("uv")
    if has_pip:
        installer: list[str] = [sys.executable, "-m", "pip", "install", "--no-index"]
    elif uv is not None:
        installer = [uv, "pip", "install", "--offline", "--python", sys.executable]
    else:
        pytest.skip("neither pip nor uv is here to install the wheel")
    run(*installer, "--no-deps", "--target", target, wheel, cwd=target)
    return target


def test_wheel_holds_every_module(wheel: Path) -> None:
    modules = {
        f"{place}/{file.relative_to(ROOT / folder).as_posix()}"
        for folder, place in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == modules | {"omni_ep/py.typed"}


def test_wheel_metadata(wheel: Path) -> None:
    """License, entry points and typing marker; nothing beside the one package in a user's import space."""
    with zipfile.ZipFile(wheel) as archive:
        info = next(name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name)
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        declared = ConfigParser()
        declared.read_string(archive.read(f"{info}/entry_points.txt").decode())
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
        top_level = archive.read(f"{info}/top_level.txt").decode().split()
    assert metadata["Name"] == "omni-ep"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in license_text
    assert top_level == ["omni_ep"]
    for group in ("vllm.platform_plugins", "vllm_omni.platform_plugins", "vllm_omni.general_plugins"):
        here = {
            entry.name: entry.value
            for entry in entry_points(group=group)
            if entry.dist is not None and entry.dist.name == "omni-ep"
        }
        assert dict(declared[group]) == here
        assert list(here) == ["omni_ep"]
    assert declared["console_scripts"]["omni-ep"] == "omni_ep.cli:main"


IMPORT_ALL = """
import importlib, sys
from importlib.metadata import entry_points, version
from pathlib import Path
target = Path(sys.argv[1]).resolve()
for name in ("platforms.cpu.executor", "platforms.cpu.worker", "models.hunyuan_image3.pipeline"):
    importlib.import_module(f"omni_ep.{name}")
called = []
for group in ("vllm.platform_plugins", "vllm_omni.platform_plugins", "vllm_omni.general_plugins"):
    for entry in entry_points(group=group):
        if entry.name == "omni_ep":
            called.append(entry.load()())
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "omni_ep"]
assert len(ours) > 20
for module in ours:
    assert target in Path(module.__file__).resolve().parents, module.__file__
print(version("omni-ep"), called)
"""


def test_installed_wheel_is_imported_alone(installed: Path, tmp_path: Path) -> None:
    """Not one module may come from the checkout that the editable install points to."""
    output = run(
        *(sys.executable, "-P", "-c", IMPORT_ALL, installed),
        cwd=tmp_path,
        PYTHONPATH=str(installed),
        VLLM_LOGGING_LEVEL="ERROR",
    )
    assert output.splitlines()[-1] == (
        "0.1.0 ['omni_ep.platforms.cpu.vllm_platform.CpuVllmPlatform', "
        "'omni_ep.platforms.cpu.platform.CpuOmniPlatform', None]"
    )


def test_installed_command_runs(installed: Path, tmp_path: Path) -> None:
    output = run(installed / "bin" / "omni-ep", "--version", cwd=tmp_path, PYTHONPATH=str(installed))
    assert output.strip() == "omni-ep 0.1.0"
