"""within_documents: any mask, in the positions of each document."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers
from flexcp.masks.core import Mask, MaskMod, lift
from flexcp.masks.tables import clamped, columns, drop_single_row, last_index, rows, run_starts, runs_of, take


class WithinDocuments(Mask):
    def __init__(self, mask: Mask, doc_ids: Tensor):
        self.mask = mask
        runs = runs_of(drop_single_row(doc_ids))
        self.batch = runs.shape[0] if runs.dim() == 2 else None
        self.heads, self.needs_pairs = mask.heads, mask.needs_pairs
        self.seq_len = runs.shape[-1]
        self._clamp_to = last_index(runs)
        self._run = runs.to(torch.int32)
        self._start = run_starts(runs).to(torch.int32)

    def __call__(self, b, h, q_idx, kv_idx):
        q_idx = clamped(q_idx, self._clamp_to)
        kv_idx = clamped(kv_idx, self._clamp_to)
        q_at, kv_at = (q_idx, kv_idx) if self.batch is None else ((b, q_idx), (b, kv_idx))
        same = self._run[q_at] == self._run[kv_at]
        q_local, kv_local = q_idx - self._start[q_at], kv_idx - self._start[kv_at]
        return same & self.mask(b, h, q_local, kv_local)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_first, q_last = take(self._run, q_lo), take(self._run, q_hi - 1)
        kv_first, kv_last = take(self._run, kv_lo), take(self._run, kv_hi - 1)
        some = (rows(q_first) <= columns(kv_last)) & (columns(kv_first) <= rows(q_last))
        pure = rows(q_first == q_last) & columns(kv_first == kv_last)
        inner_some, inner_every = self._inner(q_lo, q_hi, kv_lo, kv_hi)
        # Inside one document the inner mask decides; across a boundary it has no single answer.
        return some & (inner_some | ~pure), some & pure & inner_every

    def _inner(self, q_lo, q_hi, kv_lo, kv_hi):
        """The inner mask's classes with every range moved to the start of the document of its first token."""
        q_hi, kv_hi = q_hi.clamp(max=self.seq_len), kv_hi.clamp(max=self.seq_len)
        q_starts, kv_starts = take(self._start, q_lo), take(self._start, kv_lo)
        answers = [
            self.mask.classify(q_lo - q_start, q_hi - q_start, kv_lo - kv_start, kv_hi - kv_start)
            for q_start, kv_start in zip(q_starts.reshape(-1, q_lo.numel()), kv_starts.reshape(-1, kv_lo.numel()))
        ]
        if self.batch is None:
            return answers[0]
        shape = (1, self.heads or 1, q_lo.numel(), kv_lo.numel())
        return tuple(torch.cat([answer[i].expand(shape) for answer in answers]) for i in (0, 1))

    def __repr__(self) -> str:
        return f"within_documents({self.mask!r}, doc_ids{list(self._run.shape)})"


def within_documents(mask: Mask | MaskMod, doc_ids: Tensor) -> Mask:
    """Documents do not see each other, and within each, `mask` counts from the document's own beginning.

        within_documents(prefix_lm(2), doc_ids 0 0 0 1 1 1)
        kv 0 1 2 3 4 5
      q 0  # #
        1  # #
        2  # # #
        3        # #
        4        # #
        5        # # #

    Args:
        mask: a mask or plain function, in positions from 0 in each document; the same for all batch rows.
        doc_ids: integer tensor [S] or [B, S]: neighbours of one id are one document. Any number that comes back later
            is a new document.

    Returns:
        A Mask for sequences of exactly S tokens. Its classes are as exact as those of `mask` for boxes within one
        document, and partial for boxes across a boundary that hold a document in common.

    Raises:
        ValueError: doc_ids is not an integer tensor of shape [S] or [B, S], or `mask` distinguishes batch rows or is
            made for one sequence length.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.within_documents(masks.prefix_lm(2), torch.tensor([0, 0, 0, 1, 1, 1]))
        >>> mask(0, 0, torch.tensor(3), torch.arange(6)).int().tolist()
        [0, 0, 0, 1, 1, 0]

    Source: Krell et al. 2021, "Efficient Sequence Packing without Cross-contamination".
    """
    mask = lift(mask)
    doc_ids = integers("within_documents", "doc_ids", doc_ids, (1, 2), "[S] or [B, S]")
    if mask.batch is not None or mask.seq_len is not None:
        raise ValueError(
            f"within_documents: {mask!r} is made for particular batch rows or one sequence length; give a mask that "
            f"works at any length, such as prefix_lm(16), and use & for the others."
        )
    return WithinDocuments(mask, doc_ids)
