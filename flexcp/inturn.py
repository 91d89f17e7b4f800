"""Every rank of a group on one device, one after the other: real kernels and buffers, nothing on a wire.

For tests and measurements of what a rank computes. `in_turn` runs a function for each rank; where a rank waits for
another, that one goes on. `Replay` runs one rank again, alone, with what the others had sent it.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from flexcp.comm import Link

T = TypeVar("T")


class _Room:
    """Where ranks leave what they send. One rank at a time is awake: the one that holds the condition's lock."""

    def __init__(self) -> None:
        self.turn = threading.Condition()
        self.messages: dict[Any, deque[Tensor]] = defaultdict(deque)
        self.failed = False

    def post(self, key: Any, message: Tensor) -> None:
        self.messages[key].append(message.clone())
        self.turn.notify_all()

    def take(self, key: Any) -> Tensor:
        self.turn.wait_for(lambda: self.messages[key] or self.failed)
        if self.failed:
            raise RuntimeError("another rank failed")
        return self.messages[key].popleft()


class _Pending:
    def __init__(self, arrive: Callable[[], Tensor | None]) -> None:
        self.wait = arrive


class _TurnLink(Link):
    """A rank's connection to others of the same process.

    Attributes:
        members: the ranks of the room that this connection reaches, in order.
        received: everything that arrived, in order; the parts of it that came from this rank itself included.
    """

    def __init__(self, room: _Room, members: tuple[int, ...], me: int, received: list[Tensor | None]) -> None:
        super().__init__(None)
        self.room, self.members, self.me = room, members, me
        self.size, self.rank = len(members), members.index(me)
        self.received = received

    def divided(self, ranks: int) -> tuple[Link, Link]:
        run, place = self.rank // ranks, self.rank % ranks
        parts = self.members[run * ranks : (run + 1) * ranks], self.members[place::ranks]
        first, second = (_TurnLink(self.room, part, self.me, self.received) for part in parts)
        return first, second

    def all_gather(self, x: Tensor) -> Tensor:
        gathered = self.start_all_gather(x.contiguous()).wait()
        assert gathered is not None
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        parts = self.start_all_to_all(x.flatten(1), [1] * self.size, [1] * self.size).wait()
        assert parts is not None
        return torch.stack(list(parts)).sum(0).view(x.shape[1:])

    def start_all_gather(self, x: Tensor) -> Any:
        for to in self.members:
            self._post(to, x)
        return self._arrival(lambda: torch.stack([self._take(source) for source in self.members]))

    def start_all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Any:
        for to, part in zip(self.members, rows.split(list(send_counts))):
            self._post(to, part)
        return self._arrival(lambda: torch.cat([self._take(source) for source in self.members]))

    def shift(self, send: Tensor | None, send_to: int | None, like: Tensor | None, receive_from: int | None) -> Any:
        if send_to is not None:
            assert send is not None
            self._post(self.members[send_to], send)
        return self._arrival(lambda: None if receive_from is None else self._take(self.members[receive_from]))

    def _post(self, to: int, message: Tensor) -> None:
        self.room.post((self.members, self.me, to), message)

    def _take(self, source: int) -> Tensor:
        return self.room.take((self.members, source, self.me))

    def _arrival(self, take: Callable[[], Tensor | None]) -> _Pending:
        def arrive() -> Tensor | None:
            self.received.append(take())
            return self.received[-1]

        return _Pending(arrive)


class Replay(Link):
    """A rank's connection that gives again what `_TurnLink.received` kept; what is sent is dropped."""

    def __init__(self, size: int, rank: int, received: Sequence[Tensor | None], _coming: Any = None) -> None:
        super().__init__(None)
        self.size, self.rank, self.all = size, rank, received
        self.coming = iter(received) if _coming is None else _coming

    def divided(self, ranks: int) -> tuple[Link, Link]:
        run, place = self.rank // ranks, self.rank % ranks
        first = Replay(ranks, place, self.all, self.coming)
        return first, Replay(self.size // ranks, run, self.all, self.coming)

    def start_all_gather(self, x: Tensor) -> Any:
        return _Pending(lambda: next(self.coming))

    def start_all_to_all(self, rows: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Any:
        return _Pending(lambda: next(self.coming))

    def shift(self, send: Tensor | None, send_to: int | None, like: Tensor | None, receive_from: int | None) -> Any:
        return _Pending(lambda: next(self.coming))

    def all_gather(self, x: Tensor) -> Tensor:
        return next(self.coming)


def in_turn(size: int, function: Callable[[Link, list[Tensor | None]], T]) -> list[T]:
    """function(link, received) of every rank, in rank order; `received` fills with what reaches the rank.

    Raises:
        what the first rank that failed raised.
    """
    room, everyone = _Room(), tuple(range(size))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        received: list[Tensor | None] = []
        with room.turn:
            try:
                results[rank] = function(_TurnLink(room, everyone, rank, received), received)
            except BaseException as error:
                errors.append(error)
                room.failed = True
                room.turn.notify_all()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in everyone]
