"""What a way to split has to send: the bytes that the collectives of a compiled program are compared with."""

from benchmarks.scaling.cases import STUDIES, Case
from benchmarks.scaling.measure import Result
from examples.language_model.model import ModelConfig

PARAMETER_BYTES = 2
"""Products take parameters, and give their gradients, in bfloat16."""

ACTIVATION_BYTES = 2

FORWARD_BYTES = 9 / 16 + 1
"""A key in NVFP4 and a value in E4M3, for each of their elements, at each stop but the first."""

BACKWARD_BYTES = 9 / 16 + 1 + 1
"""The same and the key in E4M3."""

GRADIENT_BYTES = 8
"""Float32 sums of both gradients, at each stop."""


def least_bytes(result: Result) -> float:
    """Bytes that a device sends in a step.

    Args:
      result: Of a case; its recipe is `train`.

    Returns:
      FSDP: parameters gathered once and their gradients summed. Tensor parallel: the output of attention and of the
      feed-forward layer summed in each layer, and the gradients of their inputs. Ring: docs/transforms.md, and the
      gradients of the parameters summed.
    """
    model, case = _find(result)
    n = case.mesh.data * case.mesh.model * case.mesh.sequence
    parameters = PARAMETER_BYTES * result.parameters
    if case.mesh.data > 1:
        return 2 * parameters * (n - 1) / n
    if case.mesh.model > 1:
        return 2 * (n - 1) / n * 4 * model.layers * case.tokens * model.width * ACTIVATION_BYTES
    elements = model.layers * case.tokens / n * model.kv_heads * model.head_size
    ring = elements * ((FORWARD_BYTES + BACKWARD_BYTES) * (n - 1) + GRADIENT_BYTES * n)
    return ring + 2 * parameters * (n - 1) / n


def _find(result: Result) -> tuple[ModelConfig, Case]:
    for study in STUDIES.values():
        for case in study.cases:
            if (case.name, case.tokens, case.length) == (result.name, result.tokens, result.length):
                return study.model, case
    raise ValueError(f"case: no study has {result.name} with {result.tokens} tokens a step")
