"""Plain PyTorch model definitions: they call flex_attention and know nothing of context parallelism."""

from flexcp.models.configs import CONFIGS, Llama3Config, RopeScaling, get_config
from flexcp.models.errors import CheckpointError
from flexcp.models.hf_config import config_from_hf, config_to_hf, read_config
from flexcp.models.hf_names import from_hf, to_hf
from flexcp.models.llama3 import Llama3, build
from flexcp.models.pretrained import check_names, from_pretrained, load_weights, weights_of
from flexcp.models.safetensors_in import Checkpoint
from flexcp.models.safetensors_out import require_replaceable, save_pretrained

__all__ = [
    "CONFIGS",
    "Checkpoint",
    "CheckpointError",
    "Llama3",
    "Llama3Config",
    "RopeScaling",
    "build",
    "check_names",
    "config_from_hf",
    "config_to_hf",
    "from_hf",
    "from_pretrained",
    "get_config",
    "load_weights",
    "read_config",
    "require_replaceable",
    "save_pretrained",
    "to_hf",
    "weights_of",
]
