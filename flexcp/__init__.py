"""flexcp: context parallelism for FlexAttention.

plan = flexcp.plan(mask, seq_len, mesh)
with flexcp.context_parallel(plan):
    loss(model(plan.shard(tokens, pad=0), plan.positions), plan.shard(labels, pad=-100)).backward()
"""

from pathlib import Path as _Path

# In a checkout, masks/ and models/ stand beside flexcp/; installed, they lie inside it.
if not (_Path(__file__).parent / "masks" / "__init__.py").exists():
    __path__.append(str(_Path(__file__).parent.parent))

from flexcp.api import Plan, plan
from flexcp.compiled import compile
from flexcp.dispatch import bypass, context_parallel
from flexcp.op import flex_attention
from flexcp.scoremod import ScoreMod
from flexcp.version import __version__

__all__ = ["Plan", "ScoreMod", "__version__", "bypass", "compile", "context_parallel", "flex_attention", "plan"]
