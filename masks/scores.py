"""Scores: score_mods in global indices, ready for flex_attention's score_mod.

>>> from flexcp.masks import scores
>>> scores.compose(scores.softcap(50.0), scores.alibi(8))
compose(softcap(50.0), alibi(8))
"""

from flexcp.masks.alibi import alibi
from flexcp.masks.graph_bias import graph_bias
from flexcp.masks.hash_dropout import hash_dropout
from flexcp.masks.relative_bias import distance_bias, relative_bias
from flexcp.masks.sandwich import sandwich
from flexcp.masks.score import Score, compose
from flexcp.masks.sink import apply_sink, sink
from flexcp.masks.softcap import softcap

__all__ = [
    "Score",
    "compose",
    "alibi",
    "softcap",
    "relative_bias",
    "distance_bias",
    "sink",
    "apply_sink",
    "sandwich",
    "graph_bias",
    "hash_dropout",
]
