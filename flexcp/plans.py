"""The plan of each micro-batch, from the run's mask."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexcp
from flexcp.batch import Batch
from flexcp.config import TrainConfig
from flexcp.cost import CostModel, Shape
from flexcp.errors import UserError
from flexcp.fp8 import check_fp8
from flexcp.mesh import Mesh
from flexcp.usermask import MaskSource

BLIND_LAYOUTS = ("head_tail", "contiguous")  # that do not depend on what the mask lets tokens see


class Plans:
    """From a micro-batch to its plan; to be called in the same order on every rank of a cp group.

    A mask that does not ask for the documents is planned once. One that does is planned anew for each micro-batch, with
    the kind of communication and the shapes of the one before: a run that is resumed must plan the run's first
    micro-batch first, to go on with the same.

    Args:
        source: of the masks.
        mesh: along whose cp axis sequences are divided.
        device: of the plans' tensors.
    """

    def __init__(self, config: TrainConfig, source: MaskSource, mesh: Mesh, device: torch.device) -> None:
        self.config, self.source, self.mesh, self.device = config, source, mesh, device
        self._varies = source.varies(config.seq_len)
        self._reads: tuple[bool, bool] | None = None  # of the last mask, whether it reads b, and h
        self._known: dict[tuple[int, int] | None, flexcp.Plan] = {}
        self._last: flexcp.Plan | None = None

    def __call__(self, batch: Batch) -> flexcp.Plan:
        """The plan of these rows.

        Raises:
            UserError: a mask that raises, or that no plan can be made of.
        """
        mask = self.source.make(batch.doc_ids)
        if self._varies or self._reads is None:
            self._reads = self.source.reads(mask)
        reads_batch, reads_heads = self._reads
        key = (batch.first_row, batch.num_rows) if reads_batch else None
        if not self._varies and key in self._known:
            return self._known[key]
        # A mask that was made of these rows' documents counts its rows from here already.
        first_row = batch.first_row if reads_batch and not self._varies else 0
        balance, heads = self.config.balance, None
        if reads_heads or _heads_of(mask) > 1:
            balance, heads = self._for_heads(mask)
        first_head = self.mesh.tp_rank * heads if heads is not None and self.mesh.tp is not None else 0
        if first_row or first_head:
            mask = _shifted(mask, first_row, first_head)
        plan = self._plan(mask, batch.num_rows if reads_batch else None, heads, balance)
        check_fp8(self.config.fp8, {"tokens of a micro-batch": plan.local_len * batch.num_rows})
        if plan.local_len % self.mesh.degrees.tp:
            raise UserError(
                f"--tp {self.mesh.degrees.tp} cannot divide a rank's {plan.local_len} tokens equally: use a power of 2"
            )
        made_for = next(iter(plan.schedules.values())).source.batch
        if made_for not in (1, batch.num_rows):
            raise UserError(
                f"--mask {self.source.text} is made for {made_for} rows, and a micro-batch of a rank has "
                f"{batch.num_rows}: let it take doc_ids, which are those of the micro-batch, or read b"
            )
        if self._varies:
            self._last = plan
        else:
            self._known[key] = plan
        return plan

    def _for_heads(self, mask: Callable | BlockMask) -> tuple[str, int]:
        """Layout, and heads of a rank, for a mask that tells heads apart.

        Ranks with other heads must divide the sequence alike, so under tp only a layout will do that does not look at
        what the mask lets a head see.

        Raises:
            UserError: another layout was asked for, or a BlockMask, of which no heads can be taken out.
        """
        tp, balance = self.mesh.degrees.tp, self.config.balance
        heads = self.config.model_config().num_heads // tp
        if tp == 1:
            return balance, heads
        if balance not in ("auto", *BLIND_LAYOUTS) or isinstance(mask, BlockMask):
            raise UserError(
                f"--mask {self.source.text} tells heads apart, and --tp {tp} divides them: write it as a function that "
                f"reads h, and choose --balance {' or '.join(BLIND_LAYOUTS)} in place of {balance}"
            )
        return BLIND_LAYOUTS[0] if balance == "auto" else balance, heads

    def _plan(self, mask: Callable | BlockMask, batch: int | None, heads: int | None, balance: str) -> flexcp.Plan:
        config, source = self.config, self.source
        model, tp = config.model_config(), self.mesh.degrees.tp
        shape = Shape(model.num_heads // tp, model.num_kv_heads // tp, model.head_dim)
        try:
            return flexcp.plan(
                mask,
                config.seq_len,
                self.mesh.for_plan,
                batch=batch,
                heads=heads,
                balance=balance,
                comm=config.comm,
                # How many ranks share the heads depends on how many heads there are.
                cost=CostModel(shape) if config.comm.startswith("ulysses") else None,
                like=self._last,
                device=self.device,
            )
        except Exception as error:
            if source.is_users(error):
                raise source.blame(error) from error
            if isinstance(error, ValueError | TypeError):
                raise UserError(f"--mask {source.text}: {error}") from error
            raise


def _heads_of(mask: Callable | BlockMask) -> int:
    """How many heads a mask says that it tells apart."""
    return mask.shape[1] if isinstance(mask, BlockMask) else getattr(mask, "heads", None) or 1


def _shifted(mask: Callable, first_row: int, first_head: int) -> Callable:
    """A mask whose row 0 and head 0 are others of `mask`."""
    row, head = torch.tensor(first_row), torch.tensor(first_head)

    def shifted(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask(b + row.to(b.device), h + head.to(h.device), q_idx, kv_idx)

    return shifted
