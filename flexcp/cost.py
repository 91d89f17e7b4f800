"""What a placement costs in seconds: attention's arithmetic against the bytes that a rank must receive.

Every number has its unit in its name. Rates of arithmetic are measured and stand in a calibration file per device;
rates of links are the user's, or nominal where none is given.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from flexcp.errors import unknown

# Matrix products of attention over one (query, key) pair: 2 forward, 5 backward, each a multiply-add per element.
_FORWARD_FLOPS, _BACKWARD_FLOPS = 4, 10
# Of a head group more, on an H200: 0.08 to 0.12 ms forward (docs/benchmarks.md, gather in 1 and in 8 groups).
_LEAST_LATENCY_US = 100.0
_GRADIENT_BYTES = 4  # gradients of keys and values travel in fp32


@dataclass(frozen=True)
class Shape:
    """One layer's attention; the defaults are Llama3-8B in bf16.

    Attributes:
        num_heads, num_kv_heads: H and G.
        head_dim: D, of keys and of values.
        element_bytes: of q, k and v.
        layers: how many layers there are of this kind.
    """

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2
    layers: int = 1


@dataclass(frozen=True)
class Device:
    """What one rank computes and receives in a second.

    Attributes:
        forward_tflops, backward_tflops: of the attention kernel, in 10^12 operations a second.
        link_gb_s: 10^9 bytes a second that a rank receives while its group spans several nodes.
        node_gb_s: the same while the group lies within one node.
        ranks_per_node: GPUs of a node.
        latency_us: of one collective, in microseconds.
    """

    forward_tflops: float = 500.0
    backward_tflops: float = 500.0
    link_gb_s: float = 45.0
    node_gb_s: float = 450.0
    ranks_per_node: int = 8
    latency_us: float = 0.0

    def bytes_per_s(self, cp_size: int) -> float:
        return 1e9 * (self.node_gb_s if cp_size <= self.ranks_per_node else self.link_gb_s)


@dataclass(frozen=True)
class Cost:
    """Predicted times of one layer's attention, from each rank's pairs and received keys.

    Attributes:
        flops: float64 [cp_size], forward operations of each rank.
        kv_bytes: float64 [cp_size], bytes of keys and values that each rank receives.
        compute_s, comm_s: float64 [cp_size], seconds forward.
        backward_compute_s, backward_comm_s: float64 [cp_size].
        switched_bytes: of queries, keys, values and outputs that a rank receives forward where ranks share heads.
        switch_s, backward_switch_s: seconds in which ulysses swaps rows for heads and back; nothing hides them.
    """

    flops: np.ndarray
    kv_bytes: np.ndarray
    compute_s: np.ndarray
    comm_s: np.ndarray
    backward_compute_s: np.ndarray
    backward_comm_s: np.ndarray
    switched_bytes: float = 0.0
    switch_s: float = 0.0
    backward_switch_s: float = 0.0

    def times(self, layers: int) -> Cost:
        """Of so many layers."""
        return Cost(*(getattr(self, f.name) * layers for f in fields(self)))

    def plus(self, other: Cost) -> Cost:
        """Of these layers and those."""
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def least_s(self) -> float:
        """The mean of the work, forward and backward: no placement's slowest rank is faster."""
        return float(self.compute_s.mean() + self.backward_compute_s.mean())

    @property
    def forward_s(self) -> float:
        """The slowest rank's time, where communication hides behind computation or the reverse."""
        return float(np.maximum(self.compute_s, self.comm_s).max()) + self.switch_s

    @property
    def backward_s(self) -> float:
        return float(np.maximum(self.backward_compute_s, self.backward_comm_s).max()) + self.backward_switch_s


@dataclass(frozen=True)
class CostModel:
    """Turns work and traffic into seconds.

    Attributes:
        shape: of the layers' attention; for a plan of several masks, a tuple of one for each, in their order, or one.
        device: rates.

    >>> model = CostModel(Shape(num_heads=1, num_kv_heads=1), Device(forward_tflops=500.0, link_gb_s=45.0))
    >>> cost = model.cost(np.array([1e9, 1e9]), np.array([4e6, 0.0]))
    >>> cost.flops.tolist()
    [512000000000.0, 512000000000.0]
    >>> round(cost.forward_s * 1e3, 3)
    4.551
    """

    shape: Shape | tuple[Shape, ...] = Shape()
    device: Device = Device()

    def shapes(self, masks: int) -> tuple[Shape, ...]:
        """The shape of each of so many masks.

        Raises:
            ValueError: there are shapes for another number of masks.
        """
        if not isinstance(self.shape, tuple):
            return (self.shape,) * masks
        if len(self.shape) != masks:
            raise ValueError(
                f"cost has {len(self.shape)} shapes, but the plan has {masks} masks; give one for each, in order"
            )
        return self.shape

    @property
    def one(self) -> Shape:
        """The shape, or the first of several."""
        return self.shape[0] if isinstance(self.shape, tuple) else self.shape

    def of(self, shape: Shape) -> CostModel:
        """The model of layers of this shape alone."""
        return replace(self, shape=shape)

    def kv_row_bytes(self, itemsize: int | None = None) -> int:
        """Bytes of the keys and values of one token in one KV head."""
        return 2 * self.one.head_dim * (itemsize or self.one.element_bytes)

    def cost(self, pairs: np.ndarray, kv_rows: np.ndarray, ulysses: int = 1, switched_rows: int = 0) -> Cost:
        """Args:
        pairs: [cp_size / ulysses], (query, key) pairs that each rank computes, summed over query heads.
        kv_rows: [cp_size / ulysses], (KV head, token) pairs that each rank receives in stages.
        ulysses: ranks that share the heads.
        switched_rows: local rows of a rank, over all masks, which it swaps for heads.
        """
        flops = pairs.astype(np.float64) * self.one.head_dim
        kv_bytes = kv_rows.astype(np.float64) * self.kv_row_bytes()
        gradient_bytes = kv_rows.astype(np.float64) * self.kv_row_bytes(_GRADIENT_BYTES)
        rate = self.device.bytes_per_s(len(pairs) * ulysses)
        latency_s = self.device.latency_us * 1e-6 * (kv_rows.max() > 0)
        q_bytes, swapped_kv_bytes, swapped_gradient_bytes = (
            switched_rows * heads * row * (ulysses - 1) / ulysses
            for heads, row in (
                (self.one.num_heads, self.one.head_dim * self.one.element_bytes),
                (max(self.one.num_kv_heads, ulysses), self.kv_row_bytes()),
                (max(self.one.num_kv_heads, ulysses), self.kv_row_bytes(_GRADIENT_BYTES)),
            )
        )
        switches = self.device.latency_us * 1e-6 * (ulysses > 1)
        return Cost(
            flops * _FORWARD_FLOPS,
            kv_bytes,
            flops * _FORWARD_FLOPS / (self.device.forward_tflops * 1e12),
            kv_bytes / rate + latency_s,
            flops * _BACKWARD_FLOPS / (self.device.backward_tflops * 1e12),
            (kv_bytes + gradient_bytes) / rate + 2 * latency_s,
            2 * q_bytes + swapped_kv_bytes,
            (2 * q_bytes + swapped_kv_bytes) / rate + 2 * switches,  # q and out
            (4 * q_bytes + swapped_kv_bytes + swapped_gradient_bytes) / rate + 2 * switches,  # q, out, dout and dq
        )

    def head_groups(self, cost: Cost) -> int:
        """Into how many groups of KV heads to divide the work: one group's keys arrive behind another's work."""
        divisors = [n for n in range(1, self.one.num_kv_heads + 1) if self.one.num_kv_heads % n == 0]
        return min(divisors, key=lambda n: self._grouped_s(cost, n))

    def expected_s(self, cost: Cost) -> float:
        """Seconds forward in the best number of head groups."""
        return cost.forward_s + self._grouped_s(cost, self.head_groups(cost))

    def _grouped_s(self, cost: Cost, groups: int) -> float:
        """What n groups add to `Cost.forward_s`: all but 1 / n of the shorter part hides; each group costs its own."""
        shorter = float(np.minimum(cost.compute_s, cost.comm_s).max())
        return shorter / groups + groups * max(self.device.latency_us, _LEAST_LATENCY_US) * 1e-6


def calibrated(name: str, kernel: str, seq_len: int, link_gb_s: float | None = None) -> Device:
    """A device's measured rates, at the measured length nearest to seq_len.

    Args:
        name: a file devices/NAME.json.
        kernel: "triton", "flash", ... as the file has it.
        link_gb_s: 10^9 bytes a second that a rank receives; None: the file's nominal rates.
    """
    known = devices()
    if name not in known:
        raise unknown("device", name, known)
    data = known[name]
    kernels = data["attention_tflops"]
    if kernel not in kernels:
        raise unknown(f"kernel of {name}", kernel, kernels)
    _, forward, backward = min(kernels[kernel], key=lambda row: abs(math.log(row[0] / seq_len)))
    device = Device(forward, backward, data["link_gb_s"], data["node_gb_s"], data["ranks_per_node"], data["latency_us"])
    return device if link_gb_s is None else replace(device, link_gb_s=link_gb_s, node_gb_s=link_gb_s)


@lru_cache(maxsize=1)
def devices() -> dict[str, dict]:
    """The calibration files, by device."""
    folder = Path(__file__).parent / "devices"
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
