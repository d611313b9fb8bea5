# SPDX-License-Identifier: Apache-2.0
"""The topologies every proof runs over, by name."""

from typing import Any

from omni_ep.config import RunRequest

#: name → parallel sizes in the names of vLLM-Omni's flags.
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tensor_parallel_size": 2},
    "tp2+ep": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "cfg2+ep": {"cfg_parallel_size": 2, "enable_expert_parallel": True},
    "sp2+ep": {"ulysses_degree": 2, "enable_expert_parallel": True},
    "tp2*cfg2+ep": {"tensor_parallel_size": 2, "cfg_parallel_size": 2, "enable_expert_parallel": True},
    "cfg2*sp2+ep": {"cfg_parallel_size": 2, "ulysses_degree": 2, "enable_expert_parallel": True},
    "dp2+ep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "tp2*sp2+ep": {"tensor_parallel_size": 2, "ulysses_degree": 2, "enable_expert_parallel": True},
}


def run_request(topology: str, **picture: Any) -> RunRequest:
    """The request for a topology of the table, 64×64 unless told otherwise."""
    return RunRequest(
        **{"height": 64, "width": 64, "num_inference_steps": 4, **TOPOLOGIES[topology], **picture}
    )
