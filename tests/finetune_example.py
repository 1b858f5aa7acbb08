"""The example examples/finetune in a folder of its own, and the command lines of its guide."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parents[1] / "examples" / "finetune"
SETUP, TRAIN = "scripts/distributed_setup.py", "src/train.py"

# S1-12 … S1-16, S1-37 … S1-44, S1-49 … S1-52, S1-67 … S1-71: word for word.
DEEPSPEED = "--zero_stage 2 --offload_optimizer --bf16 --output config/ds_config.json"
FSDP = "--sharding_strategy FULL_SHARD --mixed_precision BFLOAT16 --output config/fsdp_config.json"
LAUNCHER = "--config config.yaml --num_gpus_per_node 4"
NODE = (
    "--config config.yaml --num_nodes 4 --num_gpus_per_node 8 --master_addr 192.168.1.100 "
    "--master_port 29500 --node_rank {} --use_deepspeed"
)
SLURM = (
    "--config config.yaml --num_nodes 4 --num_gpus_per_node 8 --use_deepspeed --time_limit 48:00:00"
)

# S1-23 … S1-35.
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 0.3,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
}
# S1-56 … S1-66.
FSDP_CONFIG = {
    "fsdp_transformer_layer_cls_to_wrap": [
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "GemmaDecoderLayer",
    ],
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cuda_graphs": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": False,
    "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
    "fsdp_forward_prefetch": False,
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_mixed_precision": "BFLOAT16",
}


CONFIG = """\
name: tiny
model: {name_or_path: llama-2m, init: scratch}
data: {sources: [{type: fake}], seq_length: 32}
training:
  max_steps: 4
"""
USE_DEEPSPEED = """\
distributed:
  use_deepspeed: true
  deepspeed_config: "config/ds_config.json"
  gradient_accumulation_steps: 16
"""
USE_FSDP = """\
distributed:
  use_fsdp: true
  fsdp_config: "config/fsdp_config.json"
  use_deepspeed: false
"""


@dataclass
class Said:
    """What a program has said, and its exit code."""

    code: int
    out: str
    err: str


def copy_programs(folder: Path) -> None:
    """The example's programs, into a folder that is to be a project."""
    for name in ("src", "scripts"):
        (folder / name).mkdir(parents=True)
        for path in (EXAMPLE / name).glob("*.py"):
            shutil.copy(path, folder / name)


class Project:
    """A folder with the example's programs, in which one stands; they run in this process."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, captured: pytest.CaptureFixture[str]
    ) -> None:
        self.folder, self.patch, self.captured = folder, patch, captured
        copy_programs(folder)
        patch.chdir(folder)

    def typed(self, program: str, words: str) -> Said:
        """Run a program with the words of a command line."""
        with self.patch.context() as patch:
            patch.syspath_prepend(str(self.folder / "src"))
            patch.setattr(sys, "argv", [program, *words.split()])
            with pytest.raises(SystemExit) as ended:
                runpy.run_path(program, run_name="__main__")
        for name in [name for name in sys.modules if name.startswith("finetune_")]:
            del sys.modules[name]
        out, err = self.captured.readouterr()
        return Said(int(ended.value.code or 0), out, err)

    def setup(self, words: str) -> Said:
        """Run scripts/distributed_setup.py."""
        return self.typed(SETUP, words)

    def write(self, config: str, **settings: dict[str, Any]) -> None:
        """Write config.yaml, and settings of that name as config/NAME.json."""
        (self.folder / "config.yaml").write_text(config)
        (self.folder / "config").mkdir(exist_ok=True)
        for name, data in settings.items():
            (self.folder / f"config/{name}.json").write_text(json.dumps(data, indent=2))

    def read(self, name: str) -> Any:
        """The settings config/NAME.json."""
        return json.loads((self.folder / f"config/{name}.json").read_text())

    def show(self, config: str, words: str = "") -> Any:
        """The run file that a config.yaml stands for."""
        self.write(config)
        said = self.typed(TRAIN, f"--config config.yaml --show {words}")
        assert said.code == 0, said.err
        return yaml.safe_load(said.out)
