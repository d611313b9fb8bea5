# SPDX-License-Identifier: Apache-2.0
"""Which layouts a model can run in, by the very rules that refuse a run (``omni_ep.config``)."""

from omni_ep import config
from omni_ep.config import RunRequest
from omni_ep.errors import ConfigurationError
from omni_ep.planner.model import PlannedModel


def check_layout(model: PlannedModel, request: RunRequest) -> None:
    """Raise what would be raised before a run.

    Raises:
        ConfigurationError: at the first rule that is broken.
    """
    if model.is_hunyuan_image3:
        config.validate(request, model.config, device_count=request.layout.world_size, device_kind="planned")
        return
    config.check_cfg_size(request)
    if request.enable_expert_parallel:
        config.check_expert_parallel(request.layout, model.geometry)
    else:
        config.check_expert_shards(request, model.geometry)
    config.check_attention_heads(request, model.geometry)
    config.check_key_value_heads(request, model.geometry)
    config.check_ulysses(request, model.geometry)
    config.check_shared_expert(request, model.geometry)


def reason_against(model: PlannedModel, request: RunRequest) -> str | None:
    """Why a layout is impossible, in one sentence; None if it is possible."""
    try:
        check_layout(model, request)
    except ConfigurationError as error:
        return str(error)
    return None
