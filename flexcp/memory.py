"""What a run needs on each rank's device and host, item by item, from its settings alone; nothing is allocated.

Memory is highest in backward: what lies there throughout, plus what forward has kept, plus the larger of what the loss,
one layer's backward or the optimizer need while they work. Each item carries its formula in the letters of the models:

    T rows of this rank   C dim   H, G query and KV heads   D head dim   F ffn dim   V vocabulary   N layers
    P parameters (P_layer of one layer)   e bytes of an element   R ranks that share parameters   g `every`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from flexcp.models import Llama3Config

BLOCK = 128


@dataclass(frozen=True)
class Setup:
    """All that memory depends on.

    Attributes:
        seq_len, rows: tokens of a row, and rows of a micro-batch on one rank.
        cp, dp_shard, tp: ranks of each axis.
        element_bytes: of a parameter and an activation.
        optimizer: of `optim.OPTIMIZERS`; step_in_backward: each parameter is stepped as its gradient arrives.
        fsdp: parameters are divided over dp_shard x cp.
        ac: none, full or selective.
        tile, serial, every: of lean layers (`leanlayer.Lean`); 0, 1 and 1 where layers are plain.
        chunk: tokens of the loss at a time; 0: all logits at once.
        offload, keep_bytes, fp8: of the `offload.Store`.
        comm, comm_groups: how keys arrive, and in how many groups of KV heads.
        on_cpu: computed by the reference kernel, in the host's memory: what is offloaded stays there.
    """

    model: Llama3Config
    seq_len: int
    rows: int = 1
    cp: int = 1
    dp_shard: int = 1
    tp: int = 1
    element_bytes: int = 4
    optimizer: str = "adamw"
    step_in_backward: bool = False
    fsdp: bool = True
    ac: str = "none"
    tile: int = 0
    serial: int = 1
    every: int = 1
    chunk: int = 0
    offload: bool = False
    keep_bytes: int = 0
    fp8: bool = False
    comm: str = "gather"
    comm_groups: int = 1
    on_cpu: bool = False

    @property
    def lean(self) -> bool:
        return self.tile > 0 or self.serial > 1 or self.every > 1

    @property
    def tokens(self) -> int:
        """Rows of this rank, padding included, over the micro-batch."""
        chunks = self.cp * (2 if self.cp > 1 else 1) * BLOCK
        return self.rows * -(-self.seq_len // chunks) * chunks // self.cp


@dataclass(frozen=True)
class Item:
    """One line of the estimate.

    Attributes:
        name, formula: for people.
        device, host: bytes.
    """

    name: str
    formula: str
    device: int
    host: int = 0


@dataclass(frozen=True)
class Estimate:
    """The items, whose sums are the peaks of one rank."""

    items: tuple[Item, ...]

    @property
    def device(self) -> int:
        return sum(item.device for item in self.items)

    @property
    def host(self) -> int:
        return sum(item.host for item in self.items)


def estimate(setup: Setup) -> Estimate:
    """One rank's memory at the worst moment of a step.

    >>> from flexcp.models import get_config
    >>> estimate(Setup(get_config("llama3-8b"), 8192)).items[0].device == 4 * 8030261248
    True
    """
    items = (*_states(setup), *_plan(setup), *_kept(setup), _working(setup))
    if setup.on_cpu:
        items = tuple(replace(item, device=item.device + item.host, host=0) for item in items)
    return Estimate(items)


def layer_parameters(model: Llama3Config) -> int:
    """Parameters of one decoder layer."""
    around = model.vocab_size * model.dim * (1 if model.tied_head else 2) + model.dim
    return (model.num_params - around) // model.num_layers


def _states(setup: Setup) -> Iterable[Item]:
    model, e = setup.model, setup.element_bytes
    ranks = setup.tp * (setup.dp_shard * setup.cp if setup.fsdp else 1)
    mine = -(-model.num_params // ranks)
    layer = layer_parameters(model) // setup.tp
    around = (model.num_params - model.num_layers * layer_parameters(model)) // setup.tp
    yield Item("parameters", "P e / R", mine * e)
    wide = max(4, e)
    states, formula = {
        "adamw": (2 * wide + (wide if e < 4 else 0), "(8, and 4 for an fp32 copy of lower precision) P / R"),
        "adamw8bit": (2.04, "2.04 P / R: two moments of 8 bits and their scales"),
        "adamw_bf16": (4, "4 P / R: two moments in bf16"),
    }[setup.optimizer]
    yield Item(f"optimizer ({setup.optimizer})", formula, int(mine * states))
    divided = setup.fsdp and setup.dp_shard * setup.cp > 1
    if not setup.step_in_backward:
        more = wide if setup.optimizer == "adamw" and e < 4 else 0
        yield Item("gradients", "P e / R, and 4 P / R in fp32 for the step of a lower precision", mine * (e + more))
    else:
        yield Item("gradients until their step", "the embedding's V C e", model.vocab_size * model.dim * e // setup.tp)
    if divided:
        # Two layers at a time, the flat buffer that one is gathered into, and a gradient on its way, in fp32.
        yield Item("gathered layers", "P_layer (3 e + 4)", layer * (3 * e + max(4, e)))
        yield Item("gathered embedding and head, their gradients", "2 (P - N P_layer) e", 2 * around * e)


def _plan(setup: Setup) -> Iterable[Item]:
    model, e = setup.model, setup.element_bytes
    blocks = setup.seq_len / BLOCK
    yield Item("block mask", "16 (S / 128)^2 / cp", int(16 * blocks * blocks / setup.cp))
    batch = setup.tokens * (4 * 8 + 2 * model.head_dim * e)
    yield Item("tokens, labels, positions, cos and sin", "T (32 + 2 D e)", batch)


def _row(setup: Setup) -> int:
    """Bytes of the residual stream, T C e."""
    return setup.tokens * setup.model.dim * setup.element_bytes


def _heads(setup: Setup) -> int:
    """Bytes of the query heads, T H D e, of this rank."""
    model = setup.model
    return setup.tokens * model.num_heads * model.head_dim * setup.element_bytes // setup.tp


def _keys(setup: Setup) -> int:
    """Bytes of keys and values, 2 T G D e, of this rank."""
    model = setup.model
    return 2 * setup.tokens * model.num_kv_heads * model.head_dim * setup.element_bytes // setup.tp


def _kept(setup: Setup) -> Iterable[Item]:
    """What forward keeps for backward."""
    model, layers = setup.model, setup.model.num_layers
    row, heads = _row(setup), _heads(setup)
    lse = layers * model.num_heads * setup.tokens * 4 // setup.tp
    if setup.ac == "none":
        yield Item("activations", "N T ((8 + 4 e) C + e (3 H D + 2 G D + 4 F))", layers * _plain_layer(setup))
        return
    stored = -(-layers // setup.every) * row
    formula = "N / g T C e"
    attended = layers * heads if setup.ac == "selective" else 0
    if attended and setup.lean:
        stored, formula = stored + attended, formula + ", attention's N T H D e"
    elif attended:
        yield Item("attention's output and lse", "N T H (D e + 4)", attended + lse)
    if attended and setup.lean:
        yield Item("attention's lse", "4 N T H", lse)
    size = stored * (1 if not setup.fp8 else 1 / setup.element_bytes + 4 / (model.dim * setup.element_bytes))
    if not setup.offload:
        yield Item("checkpoints", formula, int(size))
    else:
        # One is on its way beside those that may stay.
        here = min(size, max(setup.keep_bytes, row) + row)
        yield Item(
            "checkpoints" + (" in fp8" if setup.fp8 else ""),
            f"{formula}; on the device those that may stay and two on their way",
            int(here),
            int(max(0, size - setup.keep_bytes)),
        )
    if setup.lean and setup.every > 1:
        again = (min(setup.every, layers) - 1) * row
        yield Item("inputs made again", "(g - 1) T C e", 0 if setup.offload else again, again if setup.offload else 0)


def _plain_layer(setup: Setup) -> int:
    """What a plain layer leaves behind for backward: two norms' steps, attention's tensors, four of the MLP's."""
    model, e = setup.model, setup.element_bytes
    heads = (3 * model.num_heads + 2 * model.num_kv_heads) * model.head_dim // setup.tp
    return setup.tokens * (model.dim * (8 + 4 * e) + e * heads + 4 * e * model.ffn_dim // setup.tp)


def _working(setup: Setup) -> Item:
    phases = {"loss": _loss(setup), "layer": _lean_layer(setup) if setup.lean else _plain_backward(setup)}
    name = max(phases, key=lambda key: phases[key][0])
    size, formula = phases[name]
    return Item(f"working memory (the {name}'s backward)", formula, size)


def _loss(setup: Setup) -> tuple[int, str]:
    model, e = setup.model, setup.element_bytes
    wide = max(4, e)
    vocab = model.vocab_size // setup.tp
    head = vocab * model.dim * (wide + 2 * e)
    if setup.chunk == 0:
        return setup.tokens * vocab * (2 * wide + (2 * e if e < 4 else wide)), "T V (2 x 4 + 2 e), all logits"
    chunk = min(setup.chunk, setup.tokens)
    size = 2 * _row(setup) + head + chunk * vocab * (wide + 2 * e) + chunk * model.dim * 24
    return size, "2 T C e, the head's V C (4 + 2 e), a chunk of c tokens: c V (4 + 2 e)"


def _plain_backward(setup: Setup) -> tuple[int, str]:
    model, e = setup.model, setup.element_bytes
    again = 0 if setup.ac == "none" else _plain_layer(setup)
    gradients = 3 * e * setup.tokens * (model.dim + model.ffn_dim // setup.tp)
    size = again + gradients + _attention(setup, setup.comm_groups)
    return size, "a layer's activations, 3 T (C + F) e of gradients, attention's buffers"


def _lean_layer(setup: Setup) -> tuple[int, str]:
    """The largest phase of a lean layer's backward: after attention, attention itself, before attention."""
    model, e = setup.model, setup.element_bytes
    row, heads, keys = _row(setup), _heads(setup), _keys(setup)
    tile = min(setup.tile or setup.tokens, setup.tokens)
    norm = model.dim * (4 + 6 * e)
    qkv_width = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    tail = model.dim * (model.ffn_dim * 3 + 1) + model.num_heads * model.head_dim * model.dim
    wide = max(4, e)
    # The gradient of x in the place of the one that came in; then that of out. Without a store, what was kept is there.
    throughout = row + heads + (row if setup.offload else 0) + (heads if setup.offload or setup.ac == "full" else 0)
    after = throughout + tile * (norm + 5 * e * model.ffn_dim) + tail * (wide + e)
    during = throughout + tail * wide + _attention(setup, setup.serial)
    before = throughout + keys + tile * (norm + 6 * e * qkv_width) + layer_parameters(model) * (wide + e)
    return max(after, during, before), "2 T C e, 2 T H D e, and a tile's, a head group's or the gradients' sums"


def _attention(setup: Setup, groups: int) -> int:
    """Buffers of one group of KV heads in backward, keys of all ranks included."""
    heads, keys = _heads(setup) // groups, _keys(setup) // groups
    # In a ring: this rank's, those it computes with and the next; of gradients, new ones, leaving ones, arriving ones.
    whole = keys * (3 if setup.comm == "ring" else setup.cp)
    wide = max(4, setup.element_bytes) / setup.element_bytes
    inputs, results = 3 * heads + whole, heads + whole  # q, out, dout, k and v; dq, dk and dv
    if setup.on_cpu:
        # The reference kernel widens its inputs, adds up in fp32, and holds the scores of a tile of rows a few times.
        scores = min(1 << 26, setup.rows * setup.model.num_heads * 256 * setup.seq_len * 4 // groups)
        widened = 0 if setup.element_bytes >= 4 else inputs * wide
        return int(inputs + widened + results * wide + (heads + keys) * wide) + 5 * scores
    # FLASH adds up in fp32. Gradients are packed, and others' arrive, when the keys and those sums are gone.
    return int(inputs + results + results * wide + keys * wide)
