"""document: packed documents that do not see each other."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.causal import Causal
from flexcp.masks.causal import causal as causal_mask
from flexcp.masks.checks import flag, integers
from flexcp.masks.core import Mask
from flexcp.masks.reach import Reach, reach_classes
from flexcp.masks.tables import (
    clamped,
    columns,
    drop_single_row,
    extreme,
    last_index,
    rows,
    run_ends,
    run_starts,
    runs_of,
    take,
)


class Document(Mask):
    def __init__(self, doc_ids: Tensor, text: str):
        ids = drop_single_row(doc_ids)
        self.batch = ids.shape[0] if ids.dim() == 2 else None
        self.seq_len = ids.shape[-1]
        self.text = text
        self._clamp_to = last_index(ids)
        # Where each id is one run, the number of the run is as good as the id, and sorted: a box then holds
        # an interval of documents, which its two ends give. Else ids are made dense and the interval is
        # searched for.
        runs = runs_of(ids)
        self.sorted = bool((runs_of(ids.sort(-1).values)[..., -1] == runs[..., -1]).all())
        self._ids = (runs if self.sorted else torch.unique(ids, return_inverse=True)[1]).to(torch.int32)
        # A kernel reads a table of queries once a row, and one of keys for each pair.
        self._start, self._end = run_starts(runs).to(torch.int32), run_ends(runs).to(torch.int32)

    def __call__(self, b, h, q_idx, kv_idx):
        q_idx, kv_idx = clamped(q_idx, self._clamp_to), clamped(kv_idx, self._clamp_to)
        q_at, kv_at = (q_idx, kv_idx) if self.batch is None else ((b, q_idx), (b, kv_idx))
        if self.sorted:
            return (self._start[q_at] <= kv_idx) & (kv_idx < self._end[q_at])
        return self._ids[q_at] == self._ids[kv_at]

    def joined(self, other: Mask, text: str) -> Mask | None:
        """With causal, where no id comes back after others."""
        if isinstance(other, Causal) and self.sorted:
            return CausalDocument(self._start, self._end, text)
        return None

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_first, q_last = (rows(ids) for ids in self._interval(q_lo, q_hi))
        kv_first, kv_last = (columns(ids) for ids in self._interval(kv_lo, kv_hi))
        some = (q_first <= kv_last) & (kv_first <= q_last)
        every = (q_first == kv_last) & (kv_first == q_last)  # with first <= last: all four are equal
        return some, every

    def _interval(self, lo: Tensor, hi: Tensor) -> tuple[Tensor, Tensor]:
        """The smallest and largest id in each range."""
        if self.sorted:
            return take(self._ids, lo), take(self._ids, hi - 1)
        return extreme(self._ids, lo, hi, largest=False), extreme(self._ids, lo, hi, largest=True)

    def __repr__(self) -> str:
        return self.text


class CausalDocument(Reach):
    """start[q] <= kv <= q: what `Reach` says with the ends of documents, by one table that queries read.

    Args:
        start, end: where the document of each token begins and ends, int32 [S] or [B, S].
    """

    def __init__(self, start: Tensor, end: Tensor, text: str):
        super().__init__(end, text)
        self._start = start
        self.precedence = 3 if " & " in text else 9

    def __call__(self, b, h, q_idx, kv_idx):
        row = clamped(q_idx, self._clamp_to)
        start = self._start[row] if self.batch is None else self._start[b, row]
        return (start <= kv_idx) & (kv_idx <= q_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        largest, smallest = (columns(take(self._ends, at)) for at in (kv_hi - 1, kv_lo))  # ends never fall
        return reach_classes(q_lo, q_hi, kv_lo, kv_hi, largest, smallest)


def document(doc_ids: Tensor, *, causal: bool = False) -> Mask:
    """Tokens see the tokens of their own document, in both directions or causally.

        doc_ids 7 7 3 3       causal=True
        kv 0 1 2 3            kv 0 1 2 3
      q 0  # #              q 0  #
        1  # #                1  # #
        2      # #            2      #
        3      # #            3      # #

    Args:
        doc_ids: integer tensor [S] or [B, S]: the document each token belongs to. Any integers, in any order.
        causal: also kv <= q. The same mask as `causal() & document(doc_ids)`.

    Returns:
        A Mask for sequences of exactly S tokens. Its classes are exact where each id is one contiguous run
        per row, as in packing; where ids come back after others, "empty" is conservative. Indices beyond S
        (padding) read the last token's document.

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
    doc_ids = integers("document", "doc_ids", doc_ids, (1, 2), "[S] or [B, S]")
    return _build(doc_ids, flag("document", "causal", causal), f"document(doc_ids{list(doc_ids.shape)}")


def document_offsets(offsets: Tensor, *, causal: bool = False) -> Mask:
    """`document` from cumulative lengths, as varlen kernels take them.

    Document i is [offsets[i], offsets[i + 1]).

        offsets 0 2 4
        kv 0 1 2 3
      q 0  # #
        1  # #
        2      # #
        3      # #

    Args:
        offsets: integer tensor [N + 1], in tokens, from 0, nondecreasing (equal neighbours: an empty
            document).
        causal: also kv <= q.

    Returns:
        A Mask for sequences of exactly offsets[-1] tokens. Its classes are exact.

    Raises:
        ValueError: offsets is not a nondecreasing integer tensor that starts with 0 and ends above it.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.document_offsets(torch.tensor([0, 2, 4]))
        >>> mask(0, 0, torch.tensor(1), torch.arange(4)).int().tolist()
        [1, 1, 0, 0]

    Source: cu_seqlens of Dao 2023, "FlashAttention-2".
    """
    offsets = integers("document_offsets", "offsets", offsets, (1,), "[N + 1]").long()
    lengths = offsets.diff()
    if offsets[0] != 0 or offsets[-1] <= 0 or bool((lengths < 0).any()):
        raise ValueError(
            f"document_offsets: offsets must rise from 0 to the sequence length, got {offsets.tolist()[:8]}; "
            f"give the cumulative lengths, such as [0, 5, 12]."
        )
    doc_ids = torch.arange(lengths.numel(), device=offsets.device).repeat_interleave(lengths)
    text = f"document_offsets(offsets[{offsets.numel()}]"
    return _build(doc_ids, flag("document_offsets", "causal", causal), text)


def document_positions(positions: Tensor, *, causal: bool = False) -> Mask:
    """`document` from positions that restart with each document: one begins wherever a position is not last +
    1.

        positions 0 1 0 1
        kv 0 1 2 3
      q 0  # #
        1  # #
        2      # #
        3      # #

    Args:
        positions: integer tensor [S] or [B, S]: each token's position within its document, of the *whole*
            sequence (the positions of one shard have boundaries of their own).
        causal: also kv <= q.

    Returns:
        A Mask for sequences of exactly S tokens. Its classes are exact.

    Raises:
        ValueError: positions is not an integer tensor of shape [S] or [B, S], or it is empty.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.document_positions(torch.tensor([0, 1, 0, 1]))
        >>> mask(0, 0, torch.tensor(1), torch.arange(4)).int().tolist()
        [1, 1, 0, 0]

    Source: the position_ids of packed batches in Hugging Face transformers.
    """
    positions = integers("document_positions", "positions", positions, (1, 2), "[S] or [B, S]").long()
    starts = torch.zeros_like(positions)
    starts[..., 1:] = positions[..., 1:] != positions[..., :-1] + 1
    text = f"document_positions(positions{list(positions.shape)}"
    return _build(starts.cumsum(-1), flag("document_positions", "causal", causal), text)


def _build(doc_ids: Tensor, causal: bool, text: str) -> Mask:
    mask = Document(doc_ids, f"{text})")
    if not causal:
        return mask
    return mask.joined(causal_mask(), f"{text}, causal=True)") or causal_mask() & mask
