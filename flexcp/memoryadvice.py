"""What fits: from a device's memory back to options and lengths, and the sentence for what does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.table import Table

from flexcp.errors import UserError
from flexcp.loss import DEFAULT_CHUNK
from flexcp.memory import BLOCK, Estimate, Setup, estimate

TILE = 8192  # tokens: large enough for full speed on a GPU
_SHARE = 0.95  # of free memory that a run may be predicted to take; the rest is fragmentation and the libraries'


@dataclass(frozen=True)
class Limits:
    """What one rank may take.

    Attributes:
        device, host: bytes. On a CPU both are one and the same memory, and host is 0.
    """

    device: int
    host: int = 0

    def hold(self, needed: Estimate) -> bool:
        return needed.device <= self.device * _SHARE and needed.host <= self.host * _SHARE


@dataclass(frozen=True)
class Advice:
    """Options that fit, or the nearest that do not.

    Attributes:
        name: what was turned on, in words.
        setup, needed: with these options.
        fits: whether they do.
    """

    name: str
    setup: Setup
    needed: Estimate
    fits: bool


def ladder(setup: Setup, limits: Limits) -> Iterator[tuple[str, Setup]]:
    """Option sets from the cheapest in time on; each saves more than the one before, and none changes a result.

    What was asked for stays on. fp8 storage is never among them, since it rounds.
    """
    yield "as given", setup
    setup = replace(setup, chunk=setup.chunk or DEFAULT_CHUNK)
    yield "loss by chunks", setup
    if setup.ac == "none":
        setup = replace(setup, ac="selective")
        yield "selective checkpoints", setup
    if setup.tp > 1:  # lean layers need whole parameters
        yield "full checkpoints", replace(setup, ac="full")
        return
    setup = replace(setup, tile=setup.tile or min(TILE, setup.tokens))
    yield "tiles", setup
    setup = replace(setup, serial=max(setup.serial, setup.model.num_kv_heads))
    yield "head groups", setup
    full = replace(setup, ac="full")
    if limits.host:
        yield "offload", _offloaded(setup, limits)
        yield "attention again", full
        yield "attention again, offload", _offloaded(full, limits)
    else:
        yield "attention again", full
    for every in (2, 4, 8):
        if setup.every < every <= setup.model.num_layers:
            sparse = replace(full, every=every)
            yield f"a checkpoint every {every} layers", _offloaded(sparse, limits) if limits.host else sparse


def _offloaded(setup: Setup, limits: Limits) -> Setup:
    """With as many checkpoints on the device as fit there, since the rest has to be moved twice."""
    lowest = replace(setup, offload=True, keep_bytes=0)
    room = int(limits.device * _SHARE) - estimate(lowest).device
    return replace(lowest, keep_bytes=max(0, room))


def advise(setup: Setup, limits: Limits) -> Advice:
    """The cheapest options with which a run fits; else those that need least."""
    best: Advice | None = None
    for name, tried in ladder(setup, limits):
        needed = estimate(tried)
        if limits.hold(needed):
            return Advice(name, tried, needed, True)
        if best is None or _excess(needed, limits) < _excess(best.needed, limits):
            best = Advice(name, tried, needed, False)
    assert best is not None
    return best


def _excess(needed: Estimate, limits: Limits) -> int:
    return max(0, needed.device - int(limits.device * _SHARE)) + max(0, needed.host - int(limits.host * _SHARE))


def longest(setup: Setup, limits: Limits, auto: bool = True) -> tuple[int, Advice | None]:
    """The longest sequence that fits, a multiple of 128 tokens per rank, and with which options; 0 where none does.

    Args:
        auto: options may be turned on; else the setup is taken as it is.
    """

    def tried(length: int) -> Advice:
        there = replace(setup, seq_len=length)
        if auto:
            return advise(there, limits)
        needed = estimate(there)
        return Advice("as given", there, needed, limits.hold(needed))

    step = BLOCK * setup.cp * (2 if setup.cp > 1 else 1)
    if not tried(step).fits:
        return 0, None
    low, high = 1, 2
    while tried(high * step).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tried(middle * step).fits else (low, middle)
    return low * step, tried(low * step)


def require_fit(name: str, setup: Setup, limits: Limits, sharing: int = 1, force: bool = False) -> None:
    """Refuses a run that cannot fit, before anything is allocated.

    Args:
        name: the model's.
        limits: of one rank.
        sharing: ranks of this machine.
        force: refuse it in any case, since it has been found not to fit with room to spare.
    Raises:
        UserError: with what it needs, what there is and the nearest that fits.
    """
    needed = estimate(setup)
    if not force and needed.device <= limits.device and needed.host <= limits.host:
        return
    have = f"{human(limits.device)} of memory" + (f" and {human(limits.host)} on the host" if limits.host else "")
    parts = sorted(needed.items, key=lambda item: -item.device)[:3]
    largest = ", ".join(f"{human(item.device)} {item.name}" for item in parts)
    raise UserError(
        f"{name} with {setup.seq_len:,} tokens needs {human(needed.device)} per rank"
        + (f" and {human(needed.host)} on the host" if needed.host else "")
        + f" (mostly {largest}), and each of the {sharing} rank(s) here has {have}: {remedy(setup, limits)}"
    )


def remedy(setup: Setup, limits: Limits) -> str:
    """The nearest that fits, in words."""
    advice = advise(setup, limits)
    if advice.fits:
        return f"pass {flags(setup, advice.setup)}, or --memory auto"
    length, shorter = longest(setup, limits)
    if shorter is not None:
        more = flags(setup, shorter.setup)
        return f"the longest sequence that fits is --seq-len {length}" + (f" with {more}" if more else "")
    for ranks in (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        if ranks > setup.cp and setup.fsdp and advise(replace(setup, cp=ranks), limits).fits:
            return f"it fits from --cp {ranks} on with as much memory for each rank, or train a smaller model"
    return "no options make it fit: train a smaller model (llama3-debug), or use a machine with more memory"


def flags(before: Setup, after: Setup) -> str:
    """The trainer's flags that lead from one setup to the other."""
    changed = [
        ("chunk", f"--loss-chunk {after.chunk}"),
        ("ac", f"--ac {after.ac}"),
        ("tile", f"--tile {after.tile}"),
        ("serial", f"--head-serial {after.serial}"),
        ("every", f"--checkpoint-every {after.every}"),
        ("offload", "--offload on"),
        ("keep_bytes", f"--offload-keep {after.keep_bytes / 2**30:.1f}"),
    ]
    return " ".join(text for name, text in changed if getattr(before, name) != getattr(after, name))


def table(needed: Estimate, title: str) -> Table:
    """The items as a table."""
    shown = Table(title=title, title_justify="left")
    for name in ("item", "device", "host"):
        shown.add_column(name, justify="left" if name == "item" else "right", no_wrap=name != "item")
    shown.add_column("formula", overflow="fold")
    for item in needed.items:
        shown.add_row(item.name, human(item.device), human(item.host) if item.host else "", item.formula)
    shown.add_row("sum", human(needed.device), human(needed.host), "", style="bold")
    return shown


def human(size: float) -> str:
    """Bytes for people: 1.5 GiB."""
    power = 0
    while size >= 1024 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.{2 if power > 2 else 1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
