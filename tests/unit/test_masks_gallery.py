"""The gallery: its pictures are what the masks draw now, and its page shows every mask."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

from flexcp import masks

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "gallery"


def load():
    loader = SourceFileLoader("gallery", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("gallery", loader))
    loader.exec_module(module)
    return module


def test_pictures_are_up_to_date():
    stale = [
        path.name
        for path, text in load().files().items()
        if path.suffix == ".svg" and not path.name.startswith("plan-") and path.read_text() != text
    ]
    assert stale == [], "run scripts/gallery"


def test_page_shows_every_mask():
    page = load().PAGE.read_text()
    assert [name for name in masks.names() if f"![{name}](masks/{name}.svg)" not in page] == []
    assert [name for name in masks.scores.__all__ if name != "Score" and f"`{name}`" not in page] == []
