"""Names in weight files: of dtypes in safetensors files, and of experts in Hugging Face's files."""

import re

import torch

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LENGTH_BYTES = 8
"""Size of the integer at the start of a safetensors file: the length of its header."""
_FUSED = re.compile(r"(?P<prefix>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)$")


def expert_names(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of each expert's matrices in a fused tensor, in the order of their bytes; none if not fused.

    gate_up_proj [E, 2 I, d] is, for each expert, gate_proj [I, d] and up_proj [I, d].
    """
    fused = _FUSED.match(name)
    if fused is None:
        return []
    experts, rows, columns = shape
    kinds = ["down_proj"] if fused["kind"] == "down_proj" else ["gate_proj", "up_proj"]
    part = (rows // len(kinds), columns)
    return [(f"{fused['prefix']}.{e}.{kind}.weight", part) for e in range(experts) for kind in kinds]
