"""One rank of many, alone: a process group in which every other rank is played by local copies of the right size.

What this rank computes and allocates is real: its rows, its shard of the parameters, its kernels, its buffers. What it
would receive has the right size and the wrong content, copies of its own. On a GPU the copies run on a stream of their
own and take as long as the stated rate says, so that communication is hidden behind computation, or not, as it would
be. So a group of 8 or 64 ranks can be measured on one device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.compat import spin

NOT_MEASURED = (
    "not measured: waiting for slower ranks, contention and latency of the network, the share of the GPU that real "
    "collectives take, and numbers: what comes from other ranks are copies of this rank's own"
)


def simulate(rank: int, world_size: int, gb_s: float) -> None:
    """Makes this process rank `rank` of a group of which it is the only one; use in place of init_process_group.

    Args:
        gb_s: 10^9 bytes a second that a rank receives. Held to on a GPU; on a CPU the copies take what they take.
    Raises:
        ValueError: no such rank, or a rate of 0 or less.

    >>> simulate(rank=5, world_size=8, gb_s=450)
    >>> x = torch.ones(3)
    >>> parts = [torch.empty(3) for _ in range(8)]
    >>> dist.all_gather(parts, x)
    >>> dist.get_rank(), dist.get_world_size(), parts[2].tolist()
    (5, 8, [1.0, 1.0, 1.0])
    >>> dist.destroy_process_group()
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"a group of {world_size} has ranks 0 to {world_size - 1}, and no rank {rank}")
    if not gb_s > 0:
        raise ValueError(f"a rank receives more than 0 GB/s, got {gb_s}")
    # The rate is part of the backend's name, since subgroups are made from nothing but that.
    name = f"simulated{float(gb_s).hex().replace('.', '_').replace('+', '')}".lower()
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(
            name, lambda store, rank, size, timeout: SimulatedGroup(rank, size, gb_s), devices=["cpu", "cuda"]
        )
    dist.init_process_group(name, rank=rank, world_size=world_size, store=dist.HashStore())


class SimulatedGroup(dist.ProcessGroup):
    """A process group of which only one rank is there.

    Attributes:
        received_bytes: what this rank would have received from others so far.
    """

    def __init__(self, rank: int, size: int, gb_s: float) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._gb_s = rank, size, gb_s
        self._name = ""
        self._streams: dict[torch.device, Any] = {}
        self._sent: weakref.ref[Tensor] | None = None
        self.received_bytes = 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return "simulated"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return "one rank of many"

    # --- collectives, under their names in torch 2.11 and in 2.13 ---

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:
        pairs = [(part, x) for parts, x in zip(outputs, inputs) for part in parts]
        return self._copy(pairs, sum(x.nbytes for x in inputs) * (self._size - 1))

    def all_gather_single(self, output: Tensor, x: Tensor, options: Any = None) -> dist.Work:
        return self._copy([(part, x) for part in output.view(self._size, -1)], x.nbytes * (self._size - 1))

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any = None) -> dist.Work:
        pairs = [(output, parts[self._rank]) for output, parts in zip(outputs, inputs)]
        return self._copy(pairs, sum(output.nbytes for output in outputs) * (self._size - 1))

    def reduce_scatter_single(self, output: Tensor, x: Tensor, options: Any = None) -> dist.Work:
        return self._copy([(output, x.view(self._size, -1)[self._rank])], output.nbytes * (self._size - 1))

    def all_to_all_single(
        self,
        output: Tensor,
        x: Tensor,
        output_splits: list[int] | None = None,
        input_splits: list[int] | None = None,
        options: Any = None,
    ) -> dist.Work:
        own = output.nbytes // self._size
        if output_splits:
            own = output[: output_splits[self._rank]].nbytes
        return self._copy([(output, x)], output.nbytes - own)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], options: Any = None) -> dist.Work:
        received = sum(x.nbytes for rank, x in enumerate(outputs) if rank != self._rank)
        return self._copy(list(zip(outputs, inputs)), received)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        # The tensors stay what they are; a ring would receive nearly two of them.
        return self._copy([], sum(2 * x.nbytes * (self._size - 1) // self._size for x in tensors), tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._copy([], sum(x.nbytes for x in tensors), tensors)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        self._sent = weakref.ref(tensors[0])  # in flight as long as its sender holds it, and not until the next receive
        return self._copy([], 0, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> dist.Work:
        sent, self._sent = self._sent and self._sent(), None
        pairs = [(x, x if sent is None else sent) for x in tensors]
        return self._copy(pairs, sum(x.nbytes for x in tensors))

    def barrier(self, options: Any = None) -> dist.Work:
        return self._copy([], 0)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allreduce_coalesced = allreduce

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]], received: int, tensors: Sequence[Tensor] = ()) -> dist.Work:
        """Fills each first tensor from the second, on a stream of its own and no faster than the stated rate."""
        self.received_bytes += received
        devices = {x.device for x in (*tensors, *(target for target, _ in pairs))}
        device = devices.pop() if devices else torch.device("cpu")
        if device.type != "cuda":
            for target, source in pairs:
                _fill(target, source)
            return _Done(None, None)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for target, source in pairs:
                _fill(target, source)
            copied = sum(target.nbytes for target, _ in pairs)
            spin(max(0.0, received / self._gb_s / 1e9 - copied / _COPY_BYTES_PER_S))
            done = torch.cuda.Event()
            done.record(stream)
        # Held until the computing stream waits, so that their memory is not used again before the copies have run.
        return _Done(done, (pairs, tensors))


_COPY_BYTES_PER_S = 1.5e12  # of copies within one GPU; they count as part of the time that communication takes


def _fill(target: Tensor, source: Tensor) -> None:
    """Copies as much as fits; what is left of the target is filled from the beginning of the source again."""
    if target is source or not target.numel():
        return
    if not source.numel():
        target.zero_()
        return
    into, values = target.detach().view(-1), source.detach().reshape(-1)
    for start in range(0, into.numel(), values.numel()):
        part = into[start : start + values.numel()]
        part.copy_(values[: part.numel()])


class _Done(dist.Work):
    """Copies under way."""

    def __init__(self, event: Any, held: Any) -> None:
        super().__init__()
        self._event, self._held = event, held

    def wait(self, timeout: Any = None) -> bool:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
        self._held = None
        return True

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()
