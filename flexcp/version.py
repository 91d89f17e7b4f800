"""The version of flexcp, as in pyproject.toml."""

__version__ = "0.1.0"
