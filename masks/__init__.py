"""Masks and scores for FlexAttention: each mask knows what a block of pairs sees without looking at them.

>>> import torch
>>> from flexcp import masks
>>> masks.causal() & masks.document(torch.tensor([0, 0, 1, 1]))
causal() & document(doc_ids[4])
"""

from flexcp.masks import scores
from flexcp.masks.attention_sink import attention_sink
from flexcp.masks.block_causal import block_causal
from flexcp.masks.block_diffusion import block_diffusion
from flexcp.masks.block_sparse import block_sparse
from flexcp.masks.causal import causal, full
from flexcp.masks.chunked import chunked
from flexcp.masks.core import Mask, lift
from flexcp.masks.document import document, document_offsets, document_positions
from flexcp.masks.draw import Drawing, draw
from flexcp.masks.global_local import global_local
from flexcp.masks.image_cross_attention import image_cross_attention
from flexcp.masks.natten import natten
from flexcp.masks.offset import offset
from flexcp.masks.padding import padding
from flexcp.masks.parse import parse
from flexcp.masks.per_head_window import per_head_window
from flexcp.masks.prefix_lm import prefix_lm
from flexcp.masks.random_blocks import bigbird, random_blocks
from flexcp.masks.refine import classify, to_dense
from flexcp.masks.registry import names
from flexcp.masks.select import per_batch, where_head
from flexcp.masks.shared_prefix import shared_prefix
from flexcp.masks.sliding_tile import sliding_tile
from flexcp.masks.sliding_window import sliding_window
from flexcp.masks.tree import tree
from flexcp.masks.within_documents import within_documents

__all__ = [
    "Mask",
    "lift",
    "scores",
    "parse",
    "names",
    "classify",
    "draw",
    "Drawing",
    "to_dense",
    "causal",
    "full",
    "sliding_window",
    "per_head_window",
    "attention_sink",
    "chunked",
    "block_causal",
    "document",
    "document_offsets",
    "document_positions",
    "prefix_lm",
    "shared_prefix",
    "tree",
    "padding",
    "global_local",
    "random_blocks",
    "bigbird",
    "block_sparse",
    "natten",
    "sliding_tile",
    "block_diffusion",
    "image_cross_attention",
    "where_head",
    "per_batch",
    "offset",
    "within_documents",
]
