"""One step's rows as tensors."""

from dataclasses import dataclass

from torch import Tensor

IGNORE = -100  # the label that does not count, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Batch:
    """One step's rows, whole: [B, S] int64 each, not sharded.

    Attributes:
        tokens: 0 .. vocabulary - 1.
        labels: the token that follows in the same document; IGNORE at the last token of a document, at padding,
            and before tokens that are not to be learned.
        positions: the place of each token, for RoPE.
        doc_ids: the piece of a document that each token belongs to, from 0 in each row.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor
