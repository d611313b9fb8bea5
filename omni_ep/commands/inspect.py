# SPDX-License-Identifier: Apache-2.0
"""`omni-ep inspect`: what a checkpoint holds, and what each rank of a layout would read of it."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from omni_ep.commands.layout_flags import HelpFormatter, add_layout_flags
from omni_ep.config import RunRequest, check_checkpoint_folder, validate_layout
from omni_ep.errors import malformed
from omni_ep.geometry import MoEGeometry
from omni_ep.layout_names import FACTORS
from omni_ep.loading import Checkpoint, RankRole, check_against_config, plan_loading, read_checkpoint
from omni_ep.loading.expectations import expected_tensors, is_foreign
from omni_ep.loading.names import parse_expert, parse_layer

EXAMPLES = """examples:
  # layers, experts, dtypes, bytes by part
  omni-ep inspect HunyuanImage-3.0

  # what each of eight ranks would read
  omni-ep inspect HunyuanImage-3.0 --tensor-parallel-size 4 --cfg-parallel-size 2 --enable-expert-parallel
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what a checkpoint holds and what each rank would read",
        description="Check a checkpoint's headers against its index and config.json, and show layers, "
        "experts, dtypes, bytes by part, and the bytes each rank of a layout would read. No weight is read.",
        epilog=EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="checkpoint folder")
    add_layout_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0, or a ConfigurationError that names what is damaged."""
    config = check_checkpoint_folder(args.model)
    checkpoint = read_checkpoint(args.model)
    with malformed(str(args.model / "config.json")):
        geometry = MoEGeometry.from_config(config)
        check_against_config(checkpoint, config)
    request = RunRequest(
        **{name: getattr(args, name) for name in (*FACTORS.values(), "enable_expert_parallel")}
    )
    validate_layout(request, config)
    layout = request.layout
    unasked = _unasked(checkpoint, config, geometry)
    report = {
        "path": str(args.model),
        "layers": geometry.num_layers,
        "moe_layers": len(geometry.moe_layers),
        "experts": geometry.num_experts,
        "files": len(checkpoint.files),
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.nbytes,
        "header_bytes": checkpoint.header_bytes,
        "bytes_by_dtype": _by_dtype(checkpoint),
        "bytes_by_part": _by_part(checkpoint),
        "unasked": unasked,
        "layout": layout.describe() if args.enable_expert_parallel else "expert parallelism is off",
        "ep_size": layout.ep_size if args.enable_expert_parallel else 1,
        "ranks": _ranks(checkpoint, config, geometry, request, unasked),
    }
    print(json.dumps(report, indent=2) if args.json else _table(report))
    return 0


def _unasked(checkpoint: Checkpoint, config: dict[str, Any], geometry: MoEGeometry) -> list[str]:
    """What the ranks would leave out, as far as names tell; they know the modules as well."""
    expected = () if config.get("quantization_config") else expected_tensors(config)
    nobody = RankRole(experts=dict.fromkeys(geometry.moe_layers, ()))
    plan = plan_loading(
        checkpoint,
        geometry,
        nobody,
        has_home=lambda name: not expected or not is_foreign(name, expected),
    )
    return list(plan.unasked)


def _ranks(
    checkpoint: Checkpoint,
    config: dict[str, Any],
    geometry: MoEGeometry,
    request: RunRequest,
    unasked: list[str],
) -> list[dict[str, Any]]:
    layout = request.layout
    ranks: list[dict[str, Any]] = []
    for rank in range(layout.world_size):
        if not request.enable_expert_parallel:
            # vLLM-Omni's own loader reads every shard whole on every rank.
            experts = list(range(geometry.num_experts))
            ranks.append(
                {"rank": rank, "experts": experts, "bytes_needed": checkpoint.nbytes, "bytes_skipped": 0}
            )
            continue
        role = RankRole.linear(
            geometry,
            ep_rank=layout.ep_rank(rank),
            ep_size=layout.ep_size,
            tp_rank=layout.coordinates(rank).tp,
            tp_size=layout.tp,
        )
        plan = plan_loading(
            checkpoint,
            geometry,
            role,
            has_home=lambda name: name not in unasked,
            split_dense=not config.get("quantization_config"),
        )
        ranks.append(
            {
                "rank": rank,
                "experts": sorted(role.experts[geometry.moe_layers[0]]),
                "bytes_needed": plan.bytes_needed,
                "bytes_skipped": plan.bytes_skipped,
            }
        )
    return ranks


def _by_dtype(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for header in checkpoint.tensors.values():
        sizes[header.dtype] += header.nbytes
    return dict(sizes.most_common())


def _by_part(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for header in checkpoint.tensors.values():
        sizes[_part(header.name)] += header.nbytes
    return dict(sizes.most_common())


def _part(name: str) -> str:
    if parse_expert(name) is not None:
        return "routed experts"
    if parse_layer(name) is None:
        return "embeddings" if name.split(".")[0] in ("model", "lm_head") else name.split(".")[0]
    module, part = [*name.split(".")[3:5], ""][:2]
    if module == "mlp":
        return {"shared_mlp": "shared experts", "gate": "gates"}.get(part, "dense MLPs")
    return "attention" if module == "self_attn" else "norms"


def _table(report: dict[str, Any]) -> str:
    lines = [
        f"{report['path']}",
        f"  {report['layers']} layers, {report['moe_layers']} of them with {report['experts']} experts each",
        f"  {report['tensors']:,} tensors in {report['files']} file{'s' if report['files'] > 1 else ''}, "
        f"{report['bytes']:,} bytes, and {report['header_bytes']:,} of headers",
        "  headers, index and config.json agree: nothing of the transformer is missing",
        *_unasked_lines(report["unasked"]),
        "",
    ]
    total = report["bytes"] or 1
    width = max((len(name) for name in (*report["bytes_by_part"], *report["bytes_by_dtype"])), default=0)
    for title in ("bytes_by_dtype", "bytes_by_part"):
        lines.append(title.replace("_", " "))
        for name, size in report[title].items():
            lines.append(f"  {name:<{width}}  {size:>18,}  {size / total:6.1%}")
        lines.append("")
    lines += [f"what each rank reads ({report['layout']})", "  rank  experts          bytes        of all"]
    for entry in report["ranks"]:
        experts = entry["experts"]
        shown = f"{experts[0]}-{experts[-1]}" if len(experts) > 1 else "".join(map(str, experts))
        share = entry["bytes_needed"] / total
        lines.append(f"  {entry['rank']:>4}  {shown:<8} {entry['bytes_needed']:>15,}  {share:8.1%}")
    return "\n".join(lines)


def _unasked_lines(names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"  not read, since the model does not ask for them: {', '.join(names)}"]
