# SPDX-License-Identifier: Apache-2.0
"""`omni-ep parity` for real: it paints, passes, and measures the memory that was planned."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omni_ep.layout import ParallelLayout
from omni_ep.planner import Settings, Workload, load_model, make_plan, precision_of
from tests.workers import TINY

pytestmark = pytest.mark.engine


def test_report_of_a_real_run(tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "omni_ep.cli", "parity", "--model", str(TINY)),
            *("--layouts", "cfg2+ep", "--num-inference-steps", "3", "--output", str(output)),
        ],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(output.with_suffix(".json").read_text())
    assert told["passed"] is True
    [layout] = told["layouts"]
    assert (layout["verdict"], layout["ep_size"]) == ("pass", 2)
    assert layout["per_step_s"] > 0
    settings = Settings(
        model=load_model(str(TINY)), precision=precision_of("fp32"), workload=Workload(), on_cpu=True
    )
    for entry, sizes, ep in ((told["baseline"], {}, False), (layout, {"cfg": 2}, True)):
        planned = make_plan(settings, ParallelLayout(**sizes), expert_parallel=ep)
        assert [rank["parameter_bytes"] for rank in entry["memory"]] == (
            [planned.parameter_bytes] * planned.layout.world_size
        )
    html = output.read_text()
    assert "1 of 1 pass" in html
    assert html.count("data:image/png;base64,") == 3
