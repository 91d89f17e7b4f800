"""Plain PyTorch model definitions: they call flex_attention and know nothing of context parallelism."""

from flexcp.models.configs import CONFIGS, Llama3Config, RopeScaling, get_config
from flexcp.models.errors import CheckpointError
from flexcp.models.hf_config import config_from_hf, config_to_hf, read_config
from flexcp.models.hf_names import from_hf, to_hf
from flexcp.models.llama3 import Llama3, build

__all__ = [
    "CONFIGS",
    "CheckpointError",
    "Llama3",
    "Llama3Config",
    "RopeScaling",
    "build",
    "config_from_hf",
    "config_to_hf",
    "from_hf",
    "get_config",
    "read_config",
    "to_hf",
]
