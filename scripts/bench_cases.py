"""The masks that attention is measured with, and how many pairs of (query, key) they show."""

from dataclasses import dataclass

import torch

from flexcp import masks


@dataclass(frozen=True)
class Case:
    """A sequence and what it sees.

    Attributes:
        mask: by its mask_mod.
        pairs: visible ones, of (query, key).
        causal: as torch's SDPA knows it.
    """

    name: str
    mask: masks.Mask
    pairs: int
    causal: bool = False


def lengths_of_documents(seq_len: int, median: int, seed: int = 0) -> list[int]:
    """Long-tailed: half are shorter than the median, some nearly half the sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        draw = float(torch.randn((), generator=generator).exp().pow(1.3)) * median
        lengths.append(max(16, min(int(draw), seq_len // 2, seq_len - sum(lengths))))
    lengths[-1] -= sum(lengths) - seq_len
    return [n for n in lengths if n > 0]


MASKS = ("causal", "window", "documents-causal", "documents-full", "prefix")


def cases(seq_len: int, names: tuple[str, ...], median: int = 0) -> list[Case]:
    """Masks by name; median: of documents, in tokens; 0: seq_len / 64."""
    window, prefix = min(4096, seq_len // 4), seq_len // 4
    lengths = lengths_of_documents(seq_len, median or seq_len // 64)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    every = {
        "causal": Case("causal", masks.causal(), triangle(seq_len), causal=True),
        "window": Case(
            f"causal window of {window:,}", masks.sliding_window(window), triangle(seq_len) - triangle(seq_len - window)
        ),
        "documents-causal": Case(
            "causal documents", masks.causal() & masks.document(ids), sum(triangle(n) for n in lengths)
        ),
        "documents-full": Case("whole documents", masks.document(ids), sum(n * n for n in lengths)),
        "prefix": Case(f"prefix of {prefix:,}", masks.prefix_lm(prefix), triangle(seq_len) + triangle(prefix - 1)),
    }
    return [every[name] for name in names]
