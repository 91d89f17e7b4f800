"""How many bytes of tensors are alive, and the most that were at once: counted from every operation's results."""

import weakref
from collections import Counter

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Inside, counts the storages that operations return, until they are freed; what was there before is not counted.

    Attributes:
        live_bytes: now.
        peak_bytes: the most since the beginning, or since `restart`.
        calls: of each operation, by its name.
    """

    # Operators such as flex_attention pass through to the modes below.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.calls: Counter[str] = Counter()
        self._known: dict[int, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def restart(self) -> None:
        """The peak is counted from here."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in before:
                self._count(x)
        return result

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known or x.device.type == "meta":
            return
        self._known[key] = storage.nbytes()
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live_bytes -= self._known.pop(key, 0)
