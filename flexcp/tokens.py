"""What stands for a mask of a plan where only data can pass: a block mask that raises, and a number.

`plan.block_mask` is only a *token*. Its mask_mod calls an operator that raises when it is executed, so attention over a
shard can never silently be local attention: outside the context, in backward outside it, on another thread or in a
region that a compiler lowers, it stops with a sentence. The rules of `dispatch` recognise the token and put the plan's
schedule in its place; `op` finds the same schedule by the token's `handle`.
"""

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp import compat
from flexcp.planner import Schedule

if TYPE_CHECKING:
    from flexcp.api import Plan

OUTSIDE = (
    "attention over a sharded sequence ran outside its context: this block mask belongs to a flexcp plan. Call the "
    "model, and .backward() too, inside `with flexcp.context_parallel(plan):`, on the same thread; in code that is "
    "compiled with fullgraph=True call flexcp.flex_attention"
)
IN_A_GRAPH = (
    "attention over a sharded sequence, called as torch's flex_attention, does not go into a graph: without "
    "fullgraph=True the graph breaks around it, and flexcp.flex_attention goes in"
)
DEAD = (
    "the plan of this attention no longer exists: an operator holds a plan weakly, by number; keep the plan until "
    "backward has run"
)

torch.library.define("flexcp::only_inside_context", "(Tensor index) -> Tensor")


@torch.library.impl("flexcp::only_inside_context", "CompositeExplicitAutograd")
def _raise_outside(index: Tensor) -> Tensor:
    raise RuntimeError(OUTSIDE)


@torch.library.register_fake("flexcp::only_inside_context")
def _fake_outside(index: Tensor) -> Tensor:
    return torch.empty_like(index, dtype=torch.bool)


@torch.library.register_vmap("flexcp::only_inside_context")
def _vmap_outside(info: Any, in_dims: tuple[int | None, ...], index: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.flexcp.only_inside_context(index), in_dims[0]


def _token_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.ops.flexcp.only_inside_context(q_idx)


class TokenMask(BlockMask):
    """The block mask that a plan hands out.

    Attributes:
        handle: int64 [] on the CPU, the token's number. A graph takes it as an input, so a new plan is new data.
    """

    handle: Tensor

    @property
    @compat.never_a_frame
    def BLOCK_SIZE(self) -> tuple[int, int]:
        """With this block size torch leaves the comparison of lengths to the rule, whose sentence knows the plan.

        Dynamo reads it when it inlines torch's flex_attention, and stops here: it breaks the graph at the call, and
        runs the called function as it is. So compiled model code reaches the rule.
        """
        if torch.compiler.is_dynamo_compiling():
            compat.graph_break(IN_A_GRAPH)
        return compat.WHOLE_SEQUENCE_BLOCK, compat.WHOLE_SEQUENCE_BLOCK

    @BLOCK_SIZE.setter
    def BLOCK_SIZE(self, size: tuple[int, int]) -> None:
        pass


_ids = itertools.count(1)
_tokens: "weakref.WeakValueDictionary[int, Token]" = weakref.WeakValueDictionary()
# The same tokens by the address of their counts, which spares a GPU the wait for a number.
_tokens_at: "weakref.WeakValueDictionary[int, Token]" = weakref.WeakValueDictionary()


class Token:
    """One mask of one plan.

    Its number is kept as a negative count of blocks, which no real BlockMask has, and travels with the tensor wherever
    saved-tensor hooks take it. The registry is weak: a plan holds its tokens, and a token its plan weakly.
    """

    def __init__(self, plan: "Plan", schedule: Schedule, device: torch.device) -> None:
        self._plan = weakref.ref(plan)
        self.schedule = schedule
        number = next(_ids)
        self.block_mask = _token_mask(number, plan.local_len, plan.local_len, device)
        _tokens[number] = self
        _tokens_at[self.block_mask.kv_num_blocks.data_ptr()] = self

    def plan(self) -> "Plan | None":
        return self._plan()


def _token_mask(number: int, q_len: int, kv_len: int, device: torch.device) -> TokenMask:
    num_blocks = torch.full((1, 1, 1), -number, dtype=torch.int32, device=device)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    mask = TokenMask(
        seq_lengths=(q_len, kv_len),
        kv_num_blocks=num_blocks,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=num_blocks,
        q_indices=indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(compat.WHOLE_SEQUENCE_BLOCK, compat.WHOLE_SEQUENCE_BLOCK),
        mask_mod=_token_mask_mod,
    )
    mask.handle = torch.tensor(number, device="cpu")
    return mask


def token_of(block_mask: tuple[Any, ...]) -> Token | None:
    """The token that a BlockMask's tuple stands for; None for a real BlockMask."""
    num_blocks = block_mask[2]
    at = _tokens_at.get(num_blocks.data_ptr())
    return at or (_tokens.get(-int(num_blocks.flatten()[0])) if num_blocks.numel() else None)


def token_by(handle: Tensor) -> Token:
    """The token of a handle.

    Raises:
        RuntimeError: its plan is gone.
    """
    token = _tokens.get(int(handle))
    if token is None or token.plan() is None:
        raise RuntimeError(DEAD)
    return token
