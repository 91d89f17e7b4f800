"""One step's rows as tensors."""

from dataclasses import dataclass

from torch import Tensor

IGNORE = -100  # the label that does not count, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Batch:
    """Rows of a step, whole: [B, S] int64 each, not sharded.

    Attributes:
        tokens: 0 .. vocabulary - 1.
        labels: the token that follows in the same document; IGNORE at the last token of a document, at padding,
            and before tokens that are not to be learned.
        positions: the place of each token, for RoPE.
        doc_ids: the piece of a document that each token belongs to, from 0 in each row.
        first_row: the number of the first of these rows in the step; above 0 in a rank's or micro-batch's share.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor
    first_row: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.tokens)

    @property
    def num_labels(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORE).sum())

    def rows(self, start: int, stop: int) -> "Batch":
        """Rows start .. stop - 1."""
        columns = (self.tokens, self.labels, self.positions, self.doc_ids)
        return Batch(*(column[start:stop] for column in columns), first_row=self.first_row + start)

    def split(self, num_rows: int) -> list["Batch"]:
        """In pieces of `num_rows` rows, the last of fewer where it does not divide."""
        return [self.rows(start, start + num_rows) for start in range(0, self.num_rows, num_rows)]
