"""The plan of each micro-batch, from the run's mask."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import flexcp
from flexcp.batch import Batch
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.mesh import Mesh
from flexcp.usermask import MaskSource


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
        self._known: dict[tuple[int, int] | None, flexcp.Plan] = {}
        self._last: flexcp.Plan | None = None

    def __call__(self, batch: Batch) -> flexcp.Plan:
        """The plan of these rows.

        Raises:
            UserError: a mask that raises, or that no plan can be made of.
        """
        mask = self.source.make(batch.doc_ids)
        reads_batch, reads_heads = self.source.reads(mask)
        key = (batch.first_row, batch.num_rows) if reads_batch else None
        if not self._varies and key in self._known:
            return self._known[key]
        if reads_batch and batch.first_row and not self._varies:
            mask = _of_later_rows(mask, batch.first_row)
        plan = self._plan(mask, batch.num_rows if reads_batch else None, reads_heads)
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

    def _plan(self, mask: Callable | BlockMask, batch: int | None, reads_heads: bool) -> flexcp.Plan:
        config, source = self.config, self.source
        try:
            return flexcp.plan(
                mask,
                config.seq_len,
                self.mesh.for_plan,
                batch=batch,
                heads=config.model_config().num_heads if reads_heads else None,
                balance=config.balance,
                comm=config.comm,
                like=self._last,
                device=self.device,
            )
        except Exception as error:
            if source.is_users(error):
                raise source.blame(error) from error
            if isinstance(error, ValueError | TypeError):
                raise UserError(f"--mask {source.text}: {error}") from error
            raise


def _of_later_rows(mask: Callable, first_row: int) -> Callable:
    """A mask whose row 0 is row `first_row` of `mask`; one that was made of the rows' documents needs none of this."""
    first = torch.tensor(first_row)

    def later(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask(b + first.to(b.device), h, q_idx, kv_idx)

    return later
