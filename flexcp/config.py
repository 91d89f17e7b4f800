"""The settings of a run, and what follows from them.

`options` has the fields and their defaults, `commandline` reads them, `checks` says what must hold between them.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from flexcp import options
from flexcp.errors import UserError, unknown
from flexcp.leanlayer import Lean
from flexcp.models import CONFIGS, CheckpointError, Llama3Config, get_config, read_config
from flexcp.offload import Store
from flexcp.parallelize import Parallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEFAULT_MODEL = "llama3-debug"
COMPILE_BACKENDS = {"off": None, "on": "inductor", "aot_eager": "aot_eager"}


@dataclass(frozen=True)
class TrainConfig(  # a dataclass has the fields of its last base first
    options.Simulation,
    options.Logging,
    options.Output,
    options.Evaluation,
    options.Optimizer,
    options.Memory,
    options.Attention,
    options.Parallelism,
    options.Training,
    options.Data,
    options.Model,
):
    """Trains a Llama 3 under context parallelism: `flexcp.train --model llama3-debug --cp 2 --steps 20`.

    Without torchrun's variables it starts its own ranks; `torchrun -m flexcp.train` is the same program.
    """

    config: str | None = None
    """A YAML file with values for any of these fields; the command line wins over it."""

    dry_run: bool = False
    """Say what each rank needs in memory, and what would fit; allocate nothing."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def model_name(self) -> str:
        """What the model is called: the name or folder that its shape comes from."""
        return self.model or self.init_from or DEFAULT_MODEL

    @property
    def origin(self) -> str | None:
        """The folder whose tokenizer and token ids belong to the model, if it comes from one."""
        return self.init_from or (self.model if self.model and self.model not in CONFIGS else None)

    def model_config(self) -> Llama3Config:
        """The shape of the model, from its name or its folder.

        Raises:
            UserError: a name or folder that is not there, or a config.json that is not supported.
        """
        place = self.model_name
        try:
            if place in CONFIGS and place != self.init_from:
                return dataclasses.replace(get_config(place), rope_precision=self.rope_precision)
            if Path(place).expanduser().is_dir():
                return read_config(place, self.rope_precision)
        except CheckpointError as error:
            raise UserError(f"--{'model' if self.model else 'init-from'} {place}: {error}") from None
        if self.model is None:
            raise UserError(f"--init-from {place} is no folder: name one with config.json and safetensors")
        raise UserError(f"{unknown('model', place, CONFIGS)}, or name a folder with a config.json")

    def parallel(self, device: torch.device) -> Parallel:
        """What is done to the model."""
        store = None
        if self.offload == "on":
            store = Store(device, keep_bytes=int(self.offload_keep * 2**30), fp8=self.offload_fp8 == "on")
        lean = Lean(self.tile, self.head_serial, self.ac == "selective", self.checkpoint_every)
        backend = COMPILE_BACKENDS[self.compile]
        lean_or_none = None if lean.is_plain else lean
        return Parallel(self.fsdp == "on", self.ac, store, self.fp8, self.fp8_modules, lean_or_none, backend)

    def to_yaml(self) -> str:
        """The resolved values as YAML that --config reads back."""
        values = dataclasses.asdict(self)
        for name in ("config", "dry_run"):  # the values of the first are in here already
            del values[name]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
