# SPDX-License-Identifier: Apache-2.0
"""An impossible layout is refused in the engine's own process, also without omni-ep's commands."""

import json
import multiprocessing
from pathlib import Path

import pytest

from omni_ep.deploy import deploy_file, dit_deploy_config
from tests.topologies import run_request
from tests.workers import TINY

pytestmark = pytest.mark.engine


def test_vllm_omnis_own_entry_point_refuses_with_our_sentence(tmp_path: Path) -> None:
    from vllm_omni.entrypoints.omni import Omni

    folder = tmp_path / "model"
    folder.mkdir()
    for file in TINY.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((TINY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": 9}))
    children = set(multiprocessing.active_children())
    with (
        deploy_file(dit_deploy_config(run_request("tp2+ep"))) as deploy_config,
        pytest.raises(RuntimeError, match=r"9 experts cannot be divided equally among EP=2 ranks"),
    ):
        Omni(model=str(folder), deploy_config=deploy_config)
    assert set(multiprocessing.active_children()) == children
