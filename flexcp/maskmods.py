"""What is asked of any mask_mod before it is used: that it answers bool, and which of b and h it reads."""

from collections.abc import Callable

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class NotAMask(TypeError):
    """A function that does not answer bool."""


def as_bool(visible: Tensor) -> Tensor:
    """A mask's answer, checked: masks answer bool; anything else is a score_mod or a mistake."""
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        kind = visible.dtype if isinstance(visible, Tensor) else type(visible).__name__
        raise NotAMask(
            f"the mask_mod returned {kind}, but a mask_mod returns bool (True: visible); "
            "a function of the score goes into flex_attention's score_mod"
        )
    return visible


def reads(mask_mod: MaskMod, device: torch.device | str) -> tuple[bool, bool]:
    """Whether a mask_mod reads b, and h.

    It is traced on one pair, and its graph tells which inputs its answer depends on.

    Args:
        device: where what it captures lives.
    Raises:
        TypeError: it does not answer bool.
        ValueError: it raises.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    index = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)]
    try:
        graph = make_fx(torch.vmap(lambda b, h, q, kv: as_bool(mask_mod(b, h, q, kv))))(*index).graph
    except NotAMask:
        raise
    except Exception as error:
        raise ValueError(f"the mask_mod {name_of(mask_mod)} raised {type(error).__name__}: {error}") from error
    graph.eliminate_dead_code()
    b, h, *_ = [node for node in graph.nodes if node.op == "placeholder"]
    return bool(b.users), bool(h.users)


def name_of(mask_mod: object) -> str:
    """What a sentence calls it."""
    return getattr(mask_mod, "__name__", type(mask_mod).__name__)
