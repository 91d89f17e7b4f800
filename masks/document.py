"""document: packed documents that do not see each other."""

from __future__ import annotations

import torch
from flexcp.masks.checks import integers
from flexcp.masks.core import Mask
from flexcp.masks.tables import columns, rows, runs_of, take
from torch import Tensor


class Document(Mask):
    def __init__(self, doc_ids: Tensor):
        if doc_ids.dim() == 2 and doc_ids.shape[0] == 1:
            doc_ids = doc_ids[0]
        self.batch = doc_ids.shape[0] if doc_ids.dim() == 2 else None
        self.seq_len = doc_ids.shape[-1]
        self._last = torch.tensor(self.seq_len - 1, dtype=torch.int32, device=doc_ids.device)
        runs = runs_of(doc_ids)
        self._runs = runs.to(torch.int32)
        # Where each id is one run, runs are as good as ids, and sorted: boxes then compare as intervals.
        self.sorted = bool((runs_of(doc_ids.sort(-1).values)[..., -1] == runs[..., -1]).all())
        self._ids = self._runs
        if not self.sorted:
            self._ids = torch.unique(doc_ids, return_inverse=True)[1].to(torch.int32)

    def __call__(self, b, h, q_idx, kv_idx):
        q_idx = torch.minimum(q_idx, self._last)
        kv_idx = torch.minimum(kv_idx, self._last)
        if self.batch is None:
            return self._ids[q_idx] == self._ids[kv_idx]
        return self._ids[b, q_idx] == self._ids[b, kv_idx]

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_first, q_last = rows(take(self._runs, q_lo)), rows(take(self._runs, q_hi - 1))
        kv_first, kv_last = columns(take(self._runs, kv_lo)), columns(take(self._runs, kv_hi - 1))
        pure = (q_first == q_last) & (kv_first == kv_last)  # one document on either side
        if self.sorted:
            return (q_first <= kv_last) & (kv_first <= q_last), pure & (q_first == kv_first)
        same = rows(take(self._ids, q_lo)) == columns(take(self._ids, kv_lo))
        return same | ~pure, same & pure

    def __repr__(self) -> str:
        return f"document(doc_ids{list(self._ids.shape)})"


def document(doc_ids: Tensor) -> Mask:
    """Tokens see the tokens of their own document, in both directions; `causal() & document(doc_ids)` packs
    for a LM.

        doc_ids 7 7 3 3
        kv 0 1 2 3
      q 0  # #
        1  # #
        2      # #
        3      # #

    Args:
        doc_ids: integer tensor [S] or [B, S]: the document each token belongs to. Any integers, in any order.

    Returns:
        A Mask for sequences of exactly S tokens. Its classes are exact where each id is one contiguous run
        per row, as in packing; where ids come back after others, boxes that hold several ids stay partial.
        Indices beyond S (padding) read the last token's document.

    Raises:
        ValueError: doc_ids is not an integer tensor of shape [S] or [B, S], or it is empty.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.causal() & masks.document(torch.tensor([7, 7, 3, 3]))
        >>> i = torch.arange(4)
        >>> mask(0, 0, i[:, None], i[None, :]).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]

    Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".
    """
    return Document(integers("document", "doc_ids", doc_ids, (1, 2), "[S] or [B, S]"))
