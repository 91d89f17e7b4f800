"""flexcp: context parallelism for FlexAttention."""

from pathlib import Path as _Path

# In a checkout, masks/ and models/ stand beside flexcp/; installed, they lie inside it.
if not (_Path(__file__).parent / "masks" / "__init__.py").exists():
    __path__.append(str(_Path(__file__).parent.parent))

__version__ = "0.1.0"
