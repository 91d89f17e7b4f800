"""sink: a learned logit for each head that takes its share of the softmax and gives nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import quantity
from flexcp.masks.score import Score, parameter


class Sink(Score):
    def __init__(self, logits: Tensor, position: int):
        self.logits, self.position = logits, position
        self._position = torch.tensor(position, dtype=torch.int32)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx == self._position, self.logits[h].to(score.dtype), score)

    def __repr__(self) -> str:
        return f"sink(logits{list(self.logits.shape)}, position={self.position})"


def sink(logits: Tensor, position: int = 0) -> Score:
    """The key at `position` has the score logits[h] whatever the query: a sink, where its value is 0.

    Reserve one position whose value row is 0 and which every query sees. Where no position is to spare,
    `apply_sink` does the same after attention.

    Args:
        logits: floating point [H], usually a Parameter.
        position: global index of the reserved key.

    Returns:
        A Score; gradients reach `logits`.

    Raises:
        ValueError: logits is not a floating-point vector, or position is not an int of at least 0.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> one = scores.sink(torch.tensor([3.0]))
        >>> one(torch.tensor(9.0), 0, torch.tensor(0), torch.tensor(5), torch.tensor(0)).item()
        3.0

    Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", 2.2 (learned bias in the denominator).
    """
    logits = parameter("sink", "logits", logits, (1,), "[H]")
    return Sink(logits, quantity("sink", "position", position, least=0)).to(logits.device)


def apply_sink(out: Tensor, lse: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Adds exp(logits[h]) to the denominator of attention that is already computed.

    Exact and differentiable in all three, and local to a rank, since it needs each row's out and lse only.

    Args:
        out: [B, H, L, D].
        lse: fp32 [B, H, L], natural logarithm of the denominator, -inf for rows that see nothing.
        logits: floating point [H], usually a Parameter.

    Returns:
        (out, lse) with the sink: out * sigmoid(lse - logits), logaddexp(lse, logits).

    Raises:
        ValueError: the shapes do not fit.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> out, lse = scores.apply_sink(torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1), torch.zeros(1))
        >>> out.flatten().tolist()
        [0.5, 0.5]

    Source: as `sink`; the merge of partial results with an empty value.
    """
    parameter("apply_sink", "logits", logits, (1,), "[H]")
    if out.dim() != 4 or lse.shape != out.shape[:3] or out.shape[1] != logits.shape[0]:
        raise ValueError(
            f"apply_sink: out [B, H, L, D], lse [B, H, L] and logits [H] are needed, got {list(out.shape)}, "
            f"{list(lse.shape)} and {list(logits.shape)}."
        )
    logits = logits.to(lse.dtype)[:, None]
    share = torch.sigmoid(lse - logits)
    return out * share[..., None].to(out.dtype), torch.logaddexp(lse, logits.expand_as(lse))
