"""What a mask is: a mask_mod that can also say what a box of pairs sees, without looking at the pairs.

FlexAttention asks a mask about one (query, key) pair at a time. A planner that shards a sequence of a million
tokens needs to know about *blocks*: is anything in this box of queries x keys visible, is all of it?
Evaluating every pair is S x S work, so a `Mask` answers in closed form, and the combinators `& | ^ ~` carry
the answers along. "Partial" (any True, all False) is always a correct answer, because inside a partial block
the mask_mod is still applied pair by pair.

Shape legend: B batch, H query heads, S sequence length, nQ / nK number of query / key ranges.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from flexcp.masks.checks import count_positional, merge_sizes, quantity

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Classes = tuple[Tensor, Tensor]


class Mask:
    """A mask_mod in global indices that also classifies boxes.

    Attributes:
        batch: number of batch rows the mask distinguishes; None: the same for all.
        heads: number of query heads it distinguishes; None: the same for all.
        seq_len: the sequence length it is made for, where it captures a table per token; None: any length.
        needs_pairs: True where `classify` cannot decide without evaluating pairs (a lifted plain function, or
            any composition that holds one).

    A subclass defines `__call__`, `classify` and `__repr__`. What it captures and reads in `__call__` must be
    tensors (0-d for a scalar): torch.compile specialises on Python ints and recompiles for each new value.
    """

    batch: int | None = None
    heads: int | None = None
    seq_len: int | None = None
    needs_pairs: bool = False
    _clamp_to: Tensor | None = None  # the last token, where `__call__` clamps its indices
    _parts: tuple[str, ...] = ()  # the attributes that are masks, asked about the same pairs as this one
    precedence: int = 9  # how tightly the expression binds, for __repr__: Python's own order, | 1, ^ 2, & 3, ~ 4

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Is this pair visible: bool, under vmap with 0-d index tensors as well as by broadcasting."""
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(b, h, q_idx, kv_idx).")

    def classify(self, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor) -> Classes:
        """Says for each box [q_lo, q_hi) x [kv_lo, kv_hi) whether any / all of its pairs are visible.

        Args:
            q_lo, q_hi: int64 [nQ], half-open and not empty, in tokens, within the sequence.
            kv_lo, kv_hi: int64 [nK], likewise.

        Returns:
            (any, all), bool, broadcastable to [batch or 1, heads or 1, nQ, nK]. `any` is False only if no
            pair of the box is visible; `all` is True only if every pair is. any True with all False promises
            nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define classify(q_lo, q_hi, kv_lo, kv_hi).")

    def to(self, device: torch.device | str) -> Mask:
        """The same mask with its tensors on `device`. What a plain function captures stays where it is."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            setattr(moved, name, _to(value, device))
        return moved

    def inside(self) -> Mask:
        """The same mask for who only asks about tokens of the sequence: look-ups in its tables are not clamped.

        A kernel asks pair by pair, so that each instruction less counts.
        """
        same = copy.copy(self)
        same._clamp_to = None
        for name in self._parts:
            setattr(same, name, getattr(self, name).inside())
        return same

    def __and__(self, other: Mask | MaskMod) -> Mask:
        return _and(self, lift(other))

    def __rand__(self, other: MaskMod) -> Mask:
        return _and(lift(other), self)

    def joined(self, other: Mask, text: str) -> Mask | None:
        """The pairs visible to both, by one mask that is cheaper than two; None where there is none.

        Args:
            text: what it is called.
        """
        return None

    def __or__(self, other: Mask | MaskMod) -> Mask:
        return Or(self, lift(other))

    def __ror__(self, other: MaskMod) -> Mask:
        return Or(lift(other), self)

    def __xor__(self, other: Mask | MaskMod) -> Mask:
        return Xor(self, lift(other))

    def __rxor__(self, other: MaskMod) -> Mask:
        return Xor(lift(other), self)

    def __invert__(self) -> Mask:
        return Not(self)


def _to(value: object, device: torch.device | str) -> object:
    if isinstance(value, Tensor | Mask):
        return value.to(device)
    if isinstance(value, tuple) and any(isinstance(item, Tensor | Mask) for item in value):
        return tuple(_to(item, device) for item in value)
    return value


class Binary(Mask):
    """Two masks of one sequence, joined pair by pair."""

    symbol: str
    _parts = ("left", "right")

    def __init__(self, left: Mask, right: Mask):
        self.left, self.right = left, right
        self.needs_pairs = left.needs_pairs or right.needs_pairs
        sides = f"{left!r} and {right!r}"
        self.batch = merge_sizes("batch rows", left.batch, right.batch, sides)
        self.heads = merge_sizes("heads", left.heads, right.heads, sides)
        self.seq_len = merge_sizes("tokens", left.seq_len, right.seq_len, sides)

    def __repr__(self) -> str:
        left, right = repr(self.left), repr(self.right)
        if self.left.precedence < self.precedence:
            left = f"({left})"
        if self.right.precedence <= self.precedence and type(self.right) is not type(self):
            right = f"({right})"
        return f"{left} {self.symbol} {right}"


class And(Binary):
    """Visible where both are. any is conservative where the two see different pairs of one box."""

    symbol, precedence = "&", 3

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) & self.right(b, h, q_idx, kv_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        left_any, left_all = self.left.classify(q_lo, q_hi, kv_lo, kv_hi)
        right_any, right_all = self.right.classify(q_lo, q_hi, kv_lo, kv_hi)
        return left_any & right_any, left_all & right_all


def _and(left: Mask, right: Mask) -> Mask:
    both = And(left, right)
    return left.joined(right, repr(both)) or right.joined(left, repr(both)) or both


class Or(Binary):
    """Visible where either is. all is conservative where the two complete each other in one box."""

    symbol, precedence = "|", 1

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) | self.right(b, h, q_idx, kv_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        left_any, left_all = self.left.classify(q_lo, q_hi, kv_lo, kv_hi)
        right_any, right_all = self.right.classify(q_lo, q_hi, kv_lo, kv_hi)
        return left_any | right_any, left_all | right_all


class Xor(Binary):
    """Visible where exactly one is. Decided only where both sides are full or empty; else partial."""

    symbol, precedence = "^", 2

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) ^ self.right(b, h, q_idx, kv_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        left_any, left_all = self.left.classify(q_lo, q_hi, kv_lo, kv_hi)
        right_any, right_all = self.right.classify(q_lo, q_hi, kv_lo, kv_hi)
        same = (left_all & right_all) | ~(left_any | right_any)
        return ~same, (left_all & ~right_any) | (right_all & ~left_any)


class Not(Mask):
    """Visible where the other is not. As exact as the other."""

    precedence = 4
    _parts = ("mask",)

    def __init__(self, mask: Mask):
        self.mask = mask
        self.batch, self.heads, self.seq_len = mask.batch, mask.heads, mask.seq_len
        self.needs_pairs = mask.needs_pairs

    def __call__(self, b, h, q_idx, kv_idx):
        return ~self.mask(b, h, q_idx, kv_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        some, every = self.mask.classify(q_lo, q_hi, kv_lo, kv_hi)
        return ~every, ~some

    def __repr__(self) -> str:
        inner = repr(self.mask)
        return f"~({inner})" if self.mask.precedence < self.precedence else f"~{inner}"


class Lifted(Mask):
    """A plain mask_mod: every box is undecided until its pairs are evaluated."""

    needs_pairs = True

    def __init__(self, fn: MaskMod, batch: int | None, heads: int | None):
        self.fn, self.batch, self.heads = fn, batch, heads

    def __call__(self, b, h, q_idx, kv_idx):
        return self.fn(b, h, q_idx, kv_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        undecided = q_lo.new_ones((1, 1), dtype=torch.bool)
        return undecided, ~undecided

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        sizes = [f"{key}={size}" for key, size in (("batch", self.batch), ("heads", self.heads)) if size]
        return f"lift({', '.join([name, *sizes])})"


def lift(fn: Mask | MaskMod, batch: int | None = None, heads: int | None = None) -> Mask:
    """A plain FlexAttention mask_mod as a Mask, so that it composes with the library.

    Args:
        fn: `mask_mod(b, h, q_idx, kv_idx) -> bool` in global indices. A Mask is returned as it is.
        batch: number of batch rows, where fn reads `b`; None: fn ignores `b`.
        heads: number of query heads, where fn reads `h`; None: fn ignores `h`.

    Returns:
        A Mask with needs_pairs=True: all its boxes are undecided, so whoever needs to know evaluates their
        pairs. `causal() & lift(fn)` leaves only the boxes that causal does not already empty.

    Raises:
        ValueError: fn is not callable or does not take four arguments; batch or heads is not a positive int.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.causal() & masks.lift(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0)
        >>> i = torch.arange(4)
        >>> mask(0, 0, i[:, None], i[None, :]).int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]

    Source: the mask_mod of torch.nn.attention.flex_attention.
    """
    if isinstance(fn, Mask):
        if batch is not None or heads is not None:
            raise ValueError(f"lift: {fn!r} already knows its batch and heads; leave out batch= and heads=.")
        return fn
    if not callable(fn):
        raise ValueError(
            f"A mask is needed (a masks.Mask or a function mask_mod(b, h, q_idx, kv_idx)), got {fn!r} of "
            f"type {type(fn).__name__}; build one with a factory such as masks.causal()."
        )
    num_args = count_positional(fn)
    if num_args is not None and num_args != 4:
        hint = " (5 arguments make a score_mod: give that to flex_attention)" if num_args == 5 else ""
        raise ValueError(
            f"A mask_mod takes 4 arguments (b, h, q_idx, kv_idx), but {getattr(fn, '__name__', fn)!r} takes "
            f"{num_args}{hint}; write it as mask_mod(b, h, q_idx, kv_idx)."
        )
    batch = None if batch is None else quantity("lift", "batch", batch)
    heads = None if heads is None else quantity("lift", "heads", heads)
    return Lifted(fn, batch, heads)
