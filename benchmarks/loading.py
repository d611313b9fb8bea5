# SPDX-License-Identifier: Apache-2.0
"""Load time and bytes read, stock vLLM-Omni beside omni-ep, on a checkpoint of about 3 GB with 64 experts.

Real CPU workers with TP=N and EP=N build the model and load it, alternately with vLLM-Omni's own pipeline
class and loader and with omni-ep's, in one run on one machine. A load's time is that of the slowest rank,
from a barrier until its ``load_weights`` returns; building the model is left out. Bytes are counted by the
operating system (``rchar`` of ``/proc/self/io``) and by omni-ep's reader. Stock maps its files (``load_file``
of safetensors 0.8), so its bytes are not in ``rchar`` and a tensor it drops costs it no read: with a warm
page cache both copy the same bytes once.

Page cache, warm: the checkpoint is in it. Cold: it is dropped before each load, which needs root.
Memory, held: the workers keep what they free (settings of glibc's allocator), so that neither loader waits
for the system to hand out pages and the loaders themselves are compared. Fresh: every load gets new pages.
Each kind's first load is not counted.

Figures are comparable within one run only, on a machine that does nothing else.
"""

import argparse
import json
import os
import sys
import time
from importlib.metadata import version
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from omni_ep.checkpoint import CheckpointSpec, inventory, make_checkpoint, tensors
from omni_ep.checkpoint.cache import cache_folder
from omni_ep.config import RunRequest
from omni_ep.worker_extension import ExpertParallelWorkerExtension

GOAL_RATIO = 0.5
"""omni-ep's time as a share of stock's, EP=4, warm."""
GOAL_OVERHEAD = 1.01
"""Bytes read per byte needed."""

_OURS = ("omni_ep.models.hunyuan_image3.pipeline", "HunyuanImage3Pipeline")
_STOCK = ("vllm_omni.diffusion.models.hunyuan_image3.pipeline_hunyuan_image3", "HunyuanImage3Pipeline")
_POOL_BYTES = 2**26
_HIDDEN_SIZE = 1024
#: What keeps freed memory in a process: no mappings of their own for large blocks, no trimming, one arena.
_HELD_MEMORY = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=1099511627776:glibc.malloc.arena_max=1"
#: What gives large blocks back as soon as they are freed; setting it also stops its growing.
_FRESH_MEMORY = "glibc.malloc.mmap_threshold=1048576"


def make(folder: Path, gigabytes: float, layers: int) -> int:
    """Make the checkpoint once; the weights repeat one pool of random bytes. Returns its bytes."""
    small = CheckpointSpec(num_experts=64, top_k=8, num_attention_heads=8, num_key_value_heads=4)
    # Bytes of the experts: layers x 64 experts x 3 x hidden x width x 2.
    width = max(32, round(gigabytes * 1e9 / (layers * 64 * 3 * _HIDDEN_SIZE * 2) / 32) * 32)
    spec = CheckpointSpec(
        num_experts=64,
        top_k=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_size=_HIDDEN_SIZE,
        num_layers=layers,
        moe_intermediate_size=width,
        num_shards=4,
    )
    total = inventory(spec).bytes
    if (folder / "complete").exists():
        return total
    make_checkpoint(folder, small)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.update(
        hidden_size=_HIDDEN_SIZE,
        num_hidden_layers=layers,
        intermediate_size=width,
        moe_intermediate_size=width,
        moe_topk=8,
        num_shared_expert=1,
    )
    config["vit_aligner"]["n_embed"] = _HIDDEN_SIZE
    # The vision tower is split by TP as well; heads do not show in its weights.
    config["vit"]["num_attention_heads"] = 4
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = _write_shards(folder, spec, total)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "complete").touch()
    return total


def _write_shards(folder: Path, spec: CheckpointSpec, total: int) -> dict[str, str]:
    # Small finite bf16 numbers whatever the bytes: the exponent's upper bits are cleared.
    pool = bytes(byte & 0x3F if index % 2 else byte for index, byte in enumerate(os.urandom(_POOL_BYTES)))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in tensors(spec):
        if filled > total * len(shards) / spec.num_shards:
            shards.append({})
        shards[-1][name] = shape
        filled += 2 * prod(shape)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        header: dict[str, Any] = {}
        end = 0
        for name, shape in shard.items():
            start, end = end, end + 2 * prod(shape)
            header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        file = folder / f"model-{number:04d}-of-{len(shards):04d}.safetensors"
        # As the safetensors library writes it.
        text = json.dumps(header, separators=(",", ":")).encode()
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for start in range(0, end, _POOL_BYTES):
                stream.write(pool[: end - start])
        weight_map.update(dict.fromkeys(shard, file.name))
    return weight_map


class LoadingExtension(ExpertParallelWorkerExtension):
    """Loads the model again and again inside a worker."""

    def timed_load(self, stock: bool) -> dict[str, Any] | None:
        """Build the model, load it, and return the figures of all ranks on rank 0."""
        import torch.distributed as dist
        from vllm_omni.diffusion import registry
        from vllm_omni.diffusion.model_loader.diffusers_loader import DiffusersPipelineLoader

        from omni_ep.models.hunyuan_image3 import patches

        module, name = _STOCK if stock else _OURS
        registry.register_diffusion_model("HunyuanImage3ForCausalMM", module, name)
        context = self.vllm_config.compilation_config  # type: ignore[attr-defined]
        context.static_forward_context.clear()
        context.static_all_moe_layers.clear()
        self.model_runner.pipeline = None  # type: ignore[attr-defined]
        mine: dict[str, Any] = {}
        load_weights = DiffusersPipelineLoader.load_weights

        def timed(loader: Any, model: Any, **options: Any) -> None:
            dist.barrier(group=_cpu_group())
            read, started = _rchar(), time.perf_counter()
            load_weights(loader, model, **options)
            mine.update(seconds=time.perf_counter() - started, rchar=_rchar() - read)
            mine.update(reported=getattr(model, "loading_report", None), module=type(model).__module__)

        DiffusersPipelineLoader.load_weights = timed
        try:
            with patches.config_from_json(trust_remote_code=False):
                self.load_model()  # type: ignore[attr-defined]
        finally:
            DiffusersPipelineLoader.load_weights = load_weights
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=_cpu_group())
        return {"ranks": everyone}


def _cpu_group() -> Any:
    from vllm_omni.diffusion.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def drop_page_cache() -> str | None:
    """Forget all clean pages; why it was not possible, or None."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError as error:
        return f"{error.strerror}; dropping the page cache needs root on the host"
    return None


def warm_page_cache(folder: Path) -> None:
    """Read every shard once."""
    for shard in folder.glob("*.safetensors"):
        with shard.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def measure(folder: Path, ranks: int, repeats: int, cold: bool) -> dict[str, Any]:
    """Both loaders in turn, in the same workers; the first load of each is left out of the figures.

    Returns:
        ``stock_samples`` and ``omni_ep_samples`` (the slowest rank's seconds, load by load), their medians
        ``stock_s`` and ``omni_ep_s``, the ``ratio`` of those, and, of the last omni-ep load,
        ``bytes_needed``, ``bytes_read`` and ``rchar`` per rank.
    """
    import torch
    from vllm.utils.network_utils import get_open_port
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig

    from omni_ep import plugin
    from omni_ep.platforms.cpu.executor import ForkserverDiffusionExecutor

    plugin.register()
    request = RunRequest(tensor_parallel_size=ranks, enable_expert_parallel=True)
    config = OmniDiffusionConfig(
        model=str(folder),
        model_class_name="HunyuanImage3ForCausalMM",
        num_gpus=ranks,
        master_port=get_open_port(),
        enforce_eager=True,
        enable_multithread_weight_load=True,
        dtype=torch.bfloat16,
        worker_extension_cls="benchmarks.loading.LoadingExtension",
        parallel_config=DiffusionParallelConfig(
            tensor_parallel_size=request.layout.tp, enable_expert_parallel=True
        ),
    )
    config.enrich_config()
    executor: Any = ForkserverDiffusionExecutor(config)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        for repeat in range(-1, repeats):
            for stock in (True, False):
                drop_page_cache() if cold else warm_page_cache(folder)
                answer = executor.collective_rpc("timed_load", args=(stock,), timeout=600.0)
                while isinstance(answer, list):
                    answer = answer[0]
                loads = answer["ranks"]
                assert all(load["module"].startswith("vllm_omni.") == stock for load in loads)
                if repeat >= 0:
                    seconds[stock].append(max(load["seconds"] for load in loads))
    finally:
        executor.shutdown()
    stock_s, omni_ep_s = median(seconds[True]), median(seconds[False])
    return {
        "ep": ranks,
        "page_cache": "cold" if cold else "warm",
        "stock_samples": seconds[True],
        "omni_ep_samples": seconds[False],
        "stock_s": stock_s,
        "omni_ep_s": omni_ep_s,
        "ratio": omni_ep_s / stock_s,
        "bytes_needed": [load["reported"]["bytes_needed"] for load in loads],
        "bytes_read": [load["reported"]["bytes_read"] for load in loads],
        "rchar": [load["rchar"] for load in loads],
    }


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 if a rank read more than the goal allows, 0 otherwise, whatever the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint (3)")
    parser.add_argument(
        "--layers", type=int, default=32, help="its layers, each with 64 experts (32, as HunyuanImage-3.0)"
    )
    parser.add_argument(
        "--memory", choices=("held", "fresh"), default="held", help="whether workers keep freed memory (held)"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where to keep it (the user's cache)")
    parser.add_argument("--ep", type=int, nargs="+", default=[2, 4], help="EP sizes (2 4)")
    parser.add_argument("--repeats", type=int, default=5, help="loads of each kind that count (5)")
    parser.add_argument("--skip-cold", action="store_true", help="measure with a warm page cache only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--report", type=Path, default=None, metavar="FILE", help="write the same JSON object to a file"
    )
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Read by glibc when the fork server starts, which is after this.
    os.environ["GLIBC_TUNABLES"] = _HELD_MEMORY if args.memory == "held" else _FRESH_MEMORY
    folder = args.folder or cache_folder() / f"loading-{args.gigabytes:g}gb-{args.layers}layers"
    size = make(folder, args.gigabytes, args.layers)
    refused = "not asked for" if args.skip_cold else drop_page_cache()
    results = [
        measure(folder, ranks, args.repeats, cold)
        for ranks in args.ep
        for cold in ([False] if refused else [False, True])
    ]
    report = {
        "checkpoint_bytes": size,
        "layers": args.layers,
        "memory": args.memory,
        "cold": refused or "measured",
        "results": results,
        "versions": {name: version(name) for name in ("omni-ep", "vllm", "vllm-omni", "torch")},
    }
    print(json.dumps(report, indent=2) if args.json else _table(report))
    if args.report is not None:
        args.report.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if max(_overhead(result, "rchar") for result in results) > GOAL_OVERHEAD else 0


def _overhead(result: dict[str, Any], counter: str) -> float:
    """Bytes read over bytes needed, of the rank where that is most; ``counter`` says who counted."""
    return max(read / needed for read, needed in zip(result[counter], result["bytes_needed"], strict=True))


def _table(report: dict[str, Any]) -> str:
    goal = ""
    lines = [
        f"{report['checkpoint_bytes']:,} bytes, {report['layers']} layers, 64 experts each; memory "
        f"{report['memory']}; cold page cache: {report['cold']}",
        "EP  cache  stock s  omni-ep s  ratio  needed by a rank  read / needed (reader, system)",
    ]
    for row in report["results"]:
        needed = max(row["bytes_needed"])
        shares = [_overhead(row, counter) for counter in ("bytes_read", "rchar")]
        lines.append(
            f"{row['ep']:>2}  {row['page_cache']:<5}  {row['stock_s']:7.2f}  {row['omni_ep_s']:9.2f}  "
            f"{row['ratio']:5.2f}  {needed:16,}  {shares[0]:.4f}, {shares[1]:.4f}"
        )
        if (row["ep"], row["page_cache"]) == (4, "warm"):
            verdict = "met" if row["ratio"] <= GOAL_RATIO else "missed"
            goal = f"goal for EP=4, warm, at most {GOAL_RATIO}: {verdict} ({row['ratio']:.3f})"
    return "\n".join([*lines, *([goal] if goal else [])])


if __name__ == "__main__":
    # Workers import the extension by its module's name.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
