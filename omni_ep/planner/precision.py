# SPDX-License-Identifier: Apache-2.0
"""How many bytes a weight takes in each number format, scales included."""

from dataclasses import dataclass

from omni_ep.errors import ConfigurationError

_NVFP4_BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """A number format for the linear layers of the transformer, and one for everything else."""

    name: str
    compute_bytes: int
    """Bytes per element of activations and of weights that are not quantised."""
    quantized: bool = False

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of one linear layer's weight [rows = outputs, columns = inputs], with its scales.

        Scales as vLLM allocates them: fp8, one float32 per tensor; int8, one float32 per output; nvfp4, one
        fp8 per 16 inputs and one float32 per tensor, two elements to a byte.
        """
        elements = rows * columns
        if not self.quantized:
            return elements * self.compute_bytes
        if self.name == "fp8":
            return elements + 4
        if self.name == "int8":
            return elements + 4 * rows
        return -(-elements // 2) + rows * -(-columns // _NVFP4_BLOCK) + 4


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(name="bf16", compute_bytes=2),
        Precision(name="fp16", compute_bytes=2),
        Precision(name="fp32", compute_bytes=4),
        Precision(name="fp8", compute_bytes=2, quantized=True),
        Precision(name="int8", compute_bytes=2, quantized=True),
        Precision(name="nvfp4", compute_bytes=2, quantized=True),
    )
}
"""By the name of the ``--dtype`` flag. Quantised formats compute in bf16."""


TORCH_NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""What configs and vLLM-Omni's ``--dtype`` call them."""


def precision_of(name: str) -> Precision:
    """The format of that name, torch's names included.

    Raises:
        ConfigurationError: naming the ones there are.
    """
    known = TORCH_NAMES.get(name, name)
    if known not in PRECISIONS:
        raise ConfigurationError(f"dtype {name!r} is unknown; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[known]
