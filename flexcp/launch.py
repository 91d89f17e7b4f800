"""Starting one process per rank on this host, and ending all of them together.

The launcher sets the variables that torchrun sets, so a rank cannot tell the two apart where it need not. It
keeps the rendezvous store itself, on a port that the system picked (nobody can take it in between), and it
holds one end of every rank's standard input: when the launcher is gone, however it died, each rank reads the
end of that pipe and leaves.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from flexcp.errors import UserError

_MARK = "FLEXCP_LAUNCH_DIR"  # set in ranks that `launch` has started: a folder they share
_POLL_S, _GRACE_S = 0.05, 3.0
_HOST = "127.0.0.1"


@dataclass(frozen=True)
class World:
    """This process's place among the ranks, from the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @staticmethod
    def from_env() -> "World | None":
        """None where nobody has started ranks, neither torchrun nor `launch`.

        Raises:
            UserError: variables that are there in part, or are no numbers.
        """
        if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
            return None
        values = {}
        for name, fallback in (
            ("RANK", None),
            ("WORLD_SIZE", None),
            ("LOCAL_RANK", "RANK"),
            ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ):
            text = os.environ.get(name, os.environ.get(fallback or ""))
            if text is None or not text.isdigit():
                raise UserError(
                    f"the environment variable {name} is {text!r}: start the ranks with torchrun, or unset RANK and "
                    "WORLD_SIZE and flexcp.train starts its own"
                )
            values[name] = int(text)
        if values["WORLD_SIZE"] > 1 and not {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
            raise UserError(
                "RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT: start the ranks with torchrun"
            )
        return World(*(values[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")))


def pick_device(world: World) -> torch.device:
    """The GPU of this rank, or the CPU where the host does not have one GPU for each of its ranks."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= world.local_size:
        return torch.device("cuda", world.local_rank)
    return torch.device("cpu")


def launch(argv: list[str], num_ranks: int, module: str = "flexcp.train") -> int:
    """Runs `python -m MODULE ARGV` once per rank and waits.

    As soon as one rank ends with an error, or the launcher is interrupted or terminated, all others are
    ended.

    Args:
        argv: the arguments of every rank.
        num_ranks: processes to start, all on this host.
        module: what each of them runs.

    Returns:
        0; or the exit code of the first rank that failed (128 + n where signal n killed it); 130 after
        Ctrl-C.
    """
    # wait_for_workers=False: this process only serves. The store must outlive the ranks.
    store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with tempfile.TemporaryDirectory(prefix="flexcp-") as shared, _terminations_raise():
        env = os.environ | {
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": _HOST,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun says it: rank 0 need not serve the store
            _MARK: shared,
        }
        ranks: list[subprocess.Popen] = []
        try:
            for rank in range(num_ranks):
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, *argv],
                        env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        # Ctrl-C reaches this process alone, which then ends the ranks without their
                        # tracebacks.
                        start_new_session=True,
                    )
                )
            return _wait(ranks, Path(shared))
        except KeyboardInterrupt:
            print("flexcp.train: interrupted", file=sys.stderr)
            return 130
        finally:
            _end(ranks)
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h")  # a progress bar that was killed has hidden the cursor
                sys.stdout.flush()


def _wait(ranks: list[subprocess.Popen], shared: Path) -> int:
    """Until all ranks have ended well, or one has not."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            # Several may have ended between two looks. One that was killed said nothing, and others missed it and said
            # so; only an abort can come of that, too. Else the one that spoke (`speak_first`) failed first.
            speaker = (shared / "speaker").read_text() if (shared / "speaker").exists() else ""
            killed = [(rank, code) for rank, code in failed if code < 0 and code != -signal.SIGABRT]
            rank, code = [*killed, *((r, c) for r, c in failed if str(r) == speaker), *failed][0]
            if code < 0:
                name = signal.Signals(-code).name
                hint = " (out of memory?)" if name == "SIGKILL" else ""
                print(f"flexcp.train: rank {rank} was killed by {name}{hint}", file=sys.stderr)
                return 128 - code
            if not speaker:
                print(f"flexcp.train: rank {rank} ended with exit code {code}", file=sys.stderr)
            return code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


def _end(ranks: list[subprocess.Popen]) -> None:
    """Ends those that still run: asks first, then insists."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + _GRACE_S
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(max(0.0, deadline - time.monotonic()))
        if rank.poll() is None:
            rank.kill()
            rank.wait()
        if rank.stdin is not None:
            with contextlib.suppress(OSError):
                rank.stdin.close()


@contextlib.contextmanager
def _terminations_raise():
    """SIGTERM ends this process like Ctrl-C does, through its `finally` clauses."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # signals belong to the main thread; a launcher elsewhere goes without
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def leave_with_launcher() -> None:
    """In a rank that `launch` has started: ends the process as soon as the launcher is gone. Else does nothing."""
    if _MARK not in os.environ:
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(1)  # not sys.exit: the main thread may be waiting inside a collective

    threading.Thread(target=watch, daemon=True, name="flexcp-launcher-watch").start()


def speak_first() -> bool:
    """Whether this rank is the first on its host to report a failure, so that one failure is told once.

    The first is the cause; what the others see is its absence. Under torchrun there is no shared folder, and
    every rank speaks.
    """
    shared = os.environ.get(_MARK)
    if shared is None:
        return True
    try:
        with open(Path(shared) / "speaker", "x") as file:
            file.write(os.environ.get("RANK", ""))
    except FileExistsError:
        return False
    except OSError:  # the launcher is gone, and its folder too
        return True
    return True


def report(error: BaseException, world: World | None) -> int:
    """Prints a failure of this process and gives its exit code.

    A sentence for a UserError (2), for a run that diverged (1) and for Ctrl-C (130); else the traceback (1).
    """
    interrupted = isinstance(error, KeyboardInterrupt)
    code = 130 if interrupted else 2 if isinstance(error, UserError) else 1
    if not speak_first():
        return code
    name = f" rank {world.rank}" if world is not None and world.size > 1 else ""
    if interrupted:
        print(f"flexcp.train:{name} interrupted", file=sys.stderr, flush=True)
        return code
    if isinstance(error, UserError | FloatingPointError):
        print(f"flexcp.train: error{' on' + name if name else ''}: {error}", file=sys.stderr, flush=True)
        return code
    text = "".join(traceback.format_exception(error))
    print(f"{text}flexcp.train:{name} failed with the traceback above", file=sys.stderr, flush=True)
    return code
