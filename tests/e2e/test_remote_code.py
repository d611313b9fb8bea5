# SPDX-License-Identifier: Apache-2.0
"""The checkpoint's Python file runs only when the user asked for it.

In a process of its own: transformers decides at import where it copies a checkpoint's code, and that place
must be the test's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import TINY

pytestmark = pytest.mark.engine

CODE_FILE = "configuration_hunyuan_image_3.py"

#: Executed by whoever imports the file: one line each time.
TRACE = """
import os
with open(os.environ["TRACE_FILE"], "a") as trace:
    trace.write(f"process {os.getpid()}\\n")
"""


def paint(folder: str, scratch: str) -> None:
    """Without trust, then with it: the engine's preprocessing in the parent, and a picture by a real rank."""
    from vllm_omni.diffusion.registry import get_diffusion_pre_process_func

    from tests.e2e.engines import ranks
    from tests.topologies import run_request
    from tests.workers import diffusion_config

    request = run_request("one rank")
    seen: dict[str, Any] = {}
    for trusted in (False, True):
        trace = Path(scratch) / f"trace_{trusted}"
        trace.touch()
        # A rank gets its parent's environment when it starts.
        os.environ["TRACE_FILE"] = str(trace)
        settings: dict[str, Any] = {"model": Path(folder), "trust_remote_code": trusted}
        assert get_diffusion_pre_process_func(diffusion_config(request, **settings)) is not None
        in_parent = len(trace.read_text().splitlines())
        with ranks(request, **settings) as live:
            assert live.paint(num_inference_steps=1)["image"].shape == (64, 64, 3)
        seen[str(trusted)] = {
            "parent": in_parent,
            "rank": len(trace.read_text().splitlines()) - in_parent,
            "copies": len(list(Path(os.environ["HF_MODULES_CACHE"]).rglob(CODE_FILE))),
        }
    print("SEEN" + json.dumps(seen))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """How often the Python file ran, and was copied to where it could: by trust, then by process."""
    scratch = tmp_path_factory.mktemp("remote_code")
    folder = scratch / "traced_checkpoint"
    shutil.copytree(TINY, folder)
    code = folder / CODE_FILE
    code.write_text(TRACE + code.read_text())
    named = json.loads((folder / "config.json").read_text())["auto_map"]["AutoConfig"]
    assert named.split(".")[0] == code.stem
    program = f"from tests.e2e.test_remote_code import paint; paint({str(folder)!r}, {str(scratch)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HF_MODULES_CACHE": str(scratch / "modules")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("SEEN"))
    result: dict[str, dict[str, int]] = json.loads(line.removeprefix("SEEN"))
    return result


def test_untrusted_code_is_neither_run_nor_copied(seen: dict[str, dict[str, int]]) -> None:
    assert seen["False"] == {"parent": 0, "rank": 0, "copies": 0}


def test_trusted_code_runs_in_parent_and_rank(seen: dict[str, dict[str, int]]) -> None:
    """So the absence of a trace above means something."""
    assert seen["True"]["parent"] >= 1
    assert seen["True"]["rank"] >= 1
    assert seen["True"]["copies"] >= 1
