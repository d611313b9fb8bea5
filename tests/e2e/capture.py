# SPDX-License-Identifier: Apache-2.0
"""A worker extension that paints one picture and hands out the latents after every step."""

import uuid
from typing import Any

import numpy as np
from vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3 import (
    get_hunyuan_image3_post_process_func,
)
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from omni_ep.worker_extension import ExpertParallelWorkerExtension


class CaptureExtension(ExpertParallelWorkerExtension):
    """Called over the executor's collective RPC; every rank paints, rank 0's answer is used."""

    def paint(self, prompt: str, sampling: dict[str, Any]) -> dict[str, Any]:
        """Returns ``latents`` (float32, one array per step), ``image`` (uint8 H×W×3) and the report."""
        pipeline = self.model_runner.pipeline  # type: ignore[attr-defined]
        scheduler = pipeline.pipeline.scheduler
        latents: list[np.ndarray] = []
        step = type(scheduler).step

        def recording_step(*args: Any, **kwargs: Any) -> Any:
            result = step(scheduler, *args, **kwargs)
            latents.append(result[0].detach().float().numpy().copy())
            return result

        scheduler.step = recording_step
        try:
            output = self.execute_model(  # type: ignore[attr-defined]
                OmniDiffusionRequest(
                    prompt={"prompt": prompt, "modalities": ["image"]},
                    sampling_params=OmniDiffusionSamplingParams(**sampling),
                    request_id=uuid.uuid4().hex,
                ),
                self.od_config,  # type: ignore[attr-defined]
            )
        finally:
            del scheduler.step
        if output.error:
            raise RuntimeError(output.error)
        payload = get_hunyuan_image3_post_process_func(self.od_config)(output.output)["payload"]  # type: ignore[attr-defined]
        return {
            "latents": latents,
            "image": np.asarray(payload["image"][0].convert("RGB")),
            "dtype": str(next(pipeline.model.layers[0].self_attn.parameters()).dtype),
            "moe_block": type(pipeline.model.layers[0].mlp).__module__,
            **self.omni_ep_report(),
        }

    def reload(self, loading: dict[str, bool], multi_thread: bool) -> None:
        """Build the model once more and load it with other settings."""
        config = self.od_config  # type: ignore[attr-defined]
        config.additional_config["omni_ep"] = loading
        config.enable_multithread_weight_load = multi_thread
        context = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        context.static_forward_context.clear()
        context.static_all_moe_layers.clear()
        self.load_model()  # type: ignore[attr-defined]

    def use_stock_pipeline(self) -> str:
        """Build vLLM-Omni's own pipeline class with the same weights in place of omni-ep's."""
        from vllm_omni.diffusion import registry

        from omni_ep.models.hunyuan_image3 import patches, precision

        ours = registry._DIFFUSION_MODELS["HunyuanImage3ForCausalMM"]
        stock = "vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3"
        registry.register_diffusion_model("HunyuanImage3ForCausalMM", stock, "HunyuanImage3Pipeline")
        context = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        context.static_forward_context.clear()
        context.static_all_moe_layers.clear()
        try:
            with patches.config_from_json(trust_remote_code=False):
                self.load_model()  # type: ignore[attr-defined]
        finally:
            registry.register_diffusion_model("HunyuanImage3ForCausalMM", ours[0], ours[2])
        pipeline = self.model_runner.pipeline  # type: ignore[attr-defined]
        # Stock cannot decode on CPU at all; the denoising before it is untouched.
        precision.run_vae_in_float32(pipeline.vae, "cpu")
        return f"{type(pipeline).__module__}.{type(pipeline).__qualname__}"


def max_error(latents: np.ndarray, reference: np.ndarray) -> float:
    """Largest difference, as a share of the reference's largest value."""
    return float(np.abs(latents - reference).max() / np.abs(reference).max())
