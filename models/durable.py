"""Files that are on the disk when a call returns, and not only in the system's cache."""

import os
from pathlib import Path


def write_durably(path: Path, content: str | bytes) -> None:
    """Writes a file, text as UTF-8, and flushes it to the disk."""
    with open(path, "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flushes a folder's entries, that is which names are in it, to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
