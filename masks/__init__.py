"""Masks and scores for FlexAttention: each mask knows what a block of pairs sees without looking at the
pairs.

>>> import torch
>>> from flexcp import masks
>>> masks.causal() & masks.document(torch.tensor([0, 0, 1, 1]))
causal() & document(doc_ids[4])
"""

from flexcp.masks.causal import causal, full
from flexcp.masks.core import Mask, lift
from flexcp.masks.document import document
from flexcp.masks.parse import parse
from flexcp.masks.prefix_lm import prefix_lm
from flexcp.masks.registry import names
from flexcp.masks.sliding_window import sliding_window

__all__ = [
    "Mask",
    "lift",
    "parse",
    "names",
    "causal",
    "full",
    "sliding_window",
    "document",
    "prefix_lm",
]
