"""The only place with collectives: what moves between the ranks of the `cp` group, counted."""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from flexcp.simulate import SimulatedGroup
from flexcp.stopwatch import Stopwatch

# torch 2.13 renamed it and warns of the old name; 2.11 knows only that.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


# Groups made from parts of others, by the group, as communicators are dear and plans are made anew for each batch.
_subgroups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]"
_subgroups = weakref.WeakKeyDictionary()


@dataclass
class Counters:
    """What a rank has put on the wire since the counters were last cleared.

    Attributes:
        p2p_messages, p2p_bytes: point-to-point sends.
        collective_calls, collective_bytes: collectives, with the bytes that leave this rank for others.
        peak_shards: the most buffers received from other ranks, or being received, that were alive at once.
        waits: where set, times how long messages that were started earlier are waited for.
    """

    p2p_messages: int = 0
    p2p_bytes: int = 0
    collective_calls: int = 0
    collective_bytes: int = 0
    peak_shards: int = 0
    waits: Stopwatch | None = field(default=None, repr=False)
    _live: int = field(default=0, repr=False)

    def clear(self) -> None:
        self.p2p_messages = self.p2p_bytes = self.collective_calls = self.collective_bytes = self.peak_shards = 0

    def _arrive(self, buffer: Tensor) -> None:
        self._live += 1
        self.peak_shards = max(self.peak_shards, self._live)
        weakref.finalize(buffer, self._leave)

    def _leave(self) -> None:
        self._live -= 1


class Pending:
    """A shift under way."""

    def __init__(
        self, received: Tensor | None, sent: Tensor | None, works: list[dist.Work], waits: Stopwatch | None = None
    ) -> None:
        self._received, self._sent, self._works = received, sent, works
        self._waits = waits

    def wait(self) -> Tensor | None:
        """The received buffer (None if nothing was to come); the sent one may be overwritten afterwards."""
        with self._waits.running() if self._waits else nullcontext():
            for work in self._works:
                work.wait()
        self._works, self._sent = [], None
        received, self._received = self._received, None
        return received


class Link:
    """This rank's connection to its `cp` group. Without a group it is alone, and everything it does is local.

    Attributes:
        simulated: the other ranks are not there (`simulate`): what comes from them has the right size, and no meaning.

    Args:
        group: the ranks; None: this one alone.
        counters: where to count; None: counters of its own.
    """

    def __init__(self, group: dist.ProcessGroup | None, counters: Counters | None = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.simulated = isinstance(group, SimulatedGroup)
        self.counters = counters or Counters()
        self._parts: dict[int, tuple[Link, Link]] = {}

    def divided(self, ranks: int) -> "tuple[Link, Link]":
        """Connections to this one's run of `ranks` consecutive ranks, and to the ranks at its place in each run.

        A collective at the first call for a number. What is sent over them counts here.
        """
        if ranks not in self._parts:
            members = list(range(self.size))
            run, place = self.rank // ranks, self.rank % ranks
            some = members[run * ranks : (run + 1) * ranks], members[place::ranks]
            first, second = (Link(_subgroup(self.group, part), self.counters) for part in some)
            self._parts[ranks] = first, second
        return self._parts[ranks]

    def adopt(self, run: dist.ProcessGroup, places: dist.ProcessGroup) -> None:
        """Makes `divided` give these groups, which exist already, for runs as long as the first."""
        self._parts[dist.get_world_size(run)] = Link(run, self.counters), Link(places, self.counters)

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank, in rank order: [cp_size, *x.shape]."""
        if self.size == 1:
            return x[None]
        x = x.contiguous()
        out = x.new_empty(self.size, *x.shape)
        _all_gather_single(out.view(-1), x.view(-1), group=self.group)
        self._count_collective(x.numel() * x.element_size() * (self.size - 1))
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum over ranks of the part meant for this one: [cp_size, ...] -> [...].

        Parts travel by all-to-all and are added in rank order, so that the sum is the same in every run.
        """
        if self.size == 1:
            return x[0]
        x = x.contiguous()
        parts = torch.empty_like(x)
        dist.all_to_all_single(parts, x, group=self.group)
        self._count_collective(x[0].numel() * x.element_size() * (self.size - 1))
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def start_all_gather(self, x: Tensor) -> Pending:
        """As `all_gather` of a contiguous x, awaited later."""
        out = x.new_empty(self.size, *x.shape)
        self.counters._arrive(out)
        work = _all_gather_single(out.view(-1), x.view(-1), group=self.group, async_op=True)
        self._count_collective(x.numel() * x.element_size() * (self.size - 1))
        return Pending(out, x, [work], self.counters.waits)

    def start_all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Pending:
        """Rows for every rank out, rows from every rank in, both in rank order; not for a rank that is alone.

        Args:
            rows: [sum(send_counts), n], contiguous.
        Returns:
            what gives [sum(receive_counts), n] when awaited.
        """
        received = rows.new_empty(sum(receive_counts), rows.shape[1])
        self.counters._arrive(received)
        # As bytes, since gloo does not know every dtype.
        work = dist.all_to_all_single(
            received.view(torch.uint8),
            rows.view(torch.uint8),
            list(receive_counts),
            list(send_counts),
            group=self.group,
            async_op=True,
        )
        row_bytes = rows.shape[1] * rows.element_size()
        self._count_collective((sum(send_counts) - send_counts[self.rank]) * row_bytes)
        return Pending(received, rows, [work], self.counters.waits)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks, in x's dtype, added in rank order."""
        return x if self.size == 1 else self.all_gather(x).sum(0)

    def shift(self, send: Tensor | None, send_to: int | None, like: Tensor | None, receive_from: int | None) -> Pending:
        """Starts sending one buffer and receiving another, point to point; either may be absent.

        Args:
            send: contiguous, untouched until `wait`; sent if send_to is a rank of the group.
            like: what the received buffer looks like; received if receive_from is a rank of the group.
        """
        operations, received = [], None
        if send_to is not None:
            assert send is not None
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=send_to))
            self.counters.p2p_messages += 1
            self.counters.p2p_bytes += send.numel() * send.element_size()
        if receive_from is not None:
            assert like is not None
            received = torch.empty_like(like)
            self.counters._arrive(received)
            operations.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=receive_from))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Pending(received, send, works, self.counters.waits)

    def _count_collective(self, sent_bytes: int) -> None:
        self.counters.collective_calls += 1
        self.counters.collective_bytes += sent_bytes


def _subgroup(group: dist.ProcessGroup | None, members: list[int]) -> dist.ProcessGroup | None:
    """The group of some ranks of a group, in ascending order; only they need to call. None where there is only one."""
    if group is None or len(members) == 1:
        return None
    if len(members) == dist.get_world_size(group):
        return group
    known = _subgroups.setdefault(group, {})
    if tuple(members) not in known:
        ranks = [dist.get_global_rank(group, member) for member in members]
        made = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        known[tuple(members)] = made
    return known[tuple(members)]


def joint_group(axis: dist.ProcessGroup, ranks: list[int]) -> dist.ProcessGroup:
    """The group of all ranks of a mesh of several axes.

    Args:
        axis: this rank's group along one of them; the joint group is made once for it.
        ranks: global numbers, ascending.
    """
    known = _subgroups.setdefault(axis, {})
    key = -1, *ranks  # not members of the group, as elsewhere
    if key not in known:
        made = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        known[key] = made
    return known[key]
