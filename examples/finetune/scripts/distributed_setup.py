"""Write what distributed training needs: DeepSpeed's and FSDP's settings, and scripts to start it.

    python scripts/distributed_setup.py deepspeed --zero_stage 2 --offload_optimizer --bf16
    python scripts/distributed_setup.py fsdp --sharding_strategy FULL_SHARD
    python scripts/distributed_setup.py launcher --config config.yaml --num_gpus_per_node 4
    python scripts/distributed_setup.py slurm --config config.yaml --num_nodes 4

The scripts are those of `isles render`, for src/train.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from finetune_config import Mapped, map_config  # noqa: E402
from finetune_errors import told  # noqa: E402
from finetune_fsdp import fsdp_precisions, fsdp_sharding, judge_fsdp, make_fsdp_file  # noqa: E402

from isles.config.interop.deepspeed import deepspeed_settings  # noqa: E402
from isles.config.load import load_run_file  # noqa: E402
from isles.config.sections.strategy import DeepSpeedStrategyConfig  # noqa: E402
from isles.config.yaml import dump_yaml  # noqa: E402
from isles.errors import ConfigError  # noqa: E402
from isles.launch.gpus import find_gpus  # noqa: E402
from isles.launch.render import render  # noqa: E402
from isles.run.records import write_text_atomic  # noqa: E402

NONE = "none"
_OFFLOAD = ("offload_optimizer", "offload_param")
BLOCKS = ["LlamaDecoderLayer", "MistralDecoderLayer", "GemmaDecoderLayer"]
TASKS = (
    "One task a node, and it starts the ranks of its node. A task for each GPU, each with a",
    "launcher of its own, would start every rank several times.",
)


def main() -> int:
    """Write what one sub-command is for."""
    options = _parser().parse_args()
    write: Callable[[argparse.Namespace], None] = options.write
    write(options)
    return 0


def write_deepspeed(options: argparse.Namespace) -> None:
    """DeepSpeed's settings, with the keys of the guide; isles says how the model is cut."""
    if options.offload_param and options.zero_stage != 3:
        raise ConfigError(
            f"--offload_param with --zero_stage {options.zero_stage}: parameters are cut, and can "
            "lie elsewhere, in stage 3 only",
            where="command line",
            fix="use --zero_stage 3, or leave --offload_param out",
        )
    precision = "bf16" if options.bf16 else "fp16" if options.fp16 else None
    run = {
        "model": {"name_or_path": "llama-2m", "init": "scratch"},
        "data": {"sources": [{"type": "fake"}]},
        "training": {
            "max_steps": 1,
            "max_grad_norm": options.gradient_clipping or None,
            "precision": f"{precision}-mixed" if precision else "32-true",
        },
        "strategy": {
            "kind": "deepspeed",
            "zero_stage": options.zero_stage,
            "offload_optimizer": "cpu" if options.offload_optimizer else "none",
            "offload_param": "cpu" if options.offload_param else "none",
        },
    }
    config = load_run_file(Path("command line"), text=dump_yaml(run)).config
    assert isinstance(config.strategy, DeepSpeedStrategyConfig)
    made = deepspeed_settings(config, config.strategy)
    zero = made["zero_optimization"]
    offload = {key: zero[key] | {"pin_memory": True} for key in _OFFLOAD if key in zero}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": options.gradient_accumulation_steps,
        "gradient_clipping": made["gradient_clipping"],
        "zero_allow_untested_optimizer": made["zero_allow_untested_optimizer"],
        "zero_force_ds_cpu_optimizer": made["zero_force_ds_cpu_optimizer"],
    }
    if precision:
        settings[precision] = made[precision]
    settings["zero_optimization"] = {
        "stage": zero["stage"],
        "contiguous_gradients": True,
        "overlap_comm": zero["overlap_comm"],
        "reduce_scatter": True,
        "reduce_bucket_size": zero["reduce_bucket_size"],
        "allgather_bucket_size": zero["allgather_bucket_size"],
        **offload,
    }
    _write(options.output, json.dumps(settings, indent=2) + "\n")
    print(f'now in config.yaml: distributed.deepspeed_config: "{options.output}"')


def write_fsdp(options: argparse.Namespace) -> None:
    """FSDP's settings, with the keys of the guide, and what becomes of each."""
    classes = options.transformer_layer_cls_to_wrap
    settings = make_fsdp_file(options.sharding_strategy, options.mixed_precision, classes)
    _write(options.output, json.dumps(settings, indent=2) + "\n")
    for line in judge_fsdp(settings, str(options.output)).lines():
        print(f"  {line}")
    print(f'now in config.yaml: distributed.fsdp_config: "{options.output}"')


def write_launcher(options: argparse.Namespace) -> None:
    """A script for one node: torchrun, and src/train.py under it."""
    several = options.num_nodes > 1
    _check_nodes(options)
    cluster: dict[str, Any] = {
        "nodes": options.num_nodes,
        "gpus_per_node": options.num_gpus_per_node,
        "network": {"port": options.master_port},
    }
    if several:
        others = [f"node-{node}" for node in range(1, options.num_nodes)]
        cluster["launcher"] = {"kind": "manual", "hosts": [options.master_addr, *others]}
        cluster["device"] = "auto" if find_gpus().gpus else "cpu"
    if several and options.node_rank is not None:
        line = f'set -- "${{1:-{options.node_rank}}}" # the node that this script is for'
        cluster["environment"] = {"setup": [line]}
    was = options.output.read_text() if options.output.exists() else ""
    text = _render(options, cluster, "torchrun")
    _write(options.output, text, executable=True)
    path = shlex.quote(str(options.output))
    print(f"start it: bash {path}" + (" on each node, at about the same time" if several else ""))
    if several and was not in ("", text):
        print(
            f"where the nodes share this folder, they share this script too: bash {path} NODE, "
            f"with NODE from 0 to {options.num_nodes - 1}"
        )


def _check_nodes(options: argparse.Namespace) -> None:
    if options.num_nodes == 1:
        for name in ("master_addr", "node_rank"):
            if getattr(options, name) not in (None, 0, "127.0.0.1"):
                _log(f"--{name} means nothing with one node")
        return
    if not options.master_addr:
        raise ConfigError(
            f"--num_nodes {options.num_nodes} without --master_addr",
            where="command line",
            fix="add --master_addr with the address at which the others reach node 0",
        )
    if options.node_rank is not None and options.node_rank >= options.num_nodes:
        raise ConfigError(
            f"--node_rank {options.node_rank} with --num_nodes {options.num_nodes}",
            where="command line",
            fix=f"the nodes are counted from 0 to {options.num_nodes - 1}",
        )


def write_slurm(options: argparse.Namespace) -> None:
    """A job script for Slurm: one task a node, torchrun in it, and src/train.py under that."""
    gpus = options.num_gpus_per_node
    extra = ["--error=slurm-%j.out"]
    if options.mem_per_gpu != NONE:
        extra.append(f"--mem-per-gpu={options.mem_per_gpu}")
    launcher = {
        "kind": "slurm",
        "partition": None if options.partition == NONE else options.partition,
        "account": options.account,
        "time": options.time_limit,
        "gres": options.gres,
        "cpus_per_node": options.cpus_per_task * gpus,
        "extra": extra,
    }
    variables = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # torch has renamed NCCL_ASYNC_ERROR_HANDLING
        "NCCL_DEBUG": options.nccl_debug,
        "NCCL_IB_DISABLE": options.nccl_ib_disable,
        "NCCL_SOCKET_IFNAME": options.nccl_socket_ifname,
    }
    environment = {
        "setup": [f"# {line}" for line in TASKS],
        "modules": options.modules,
        "conda": None if options.conda_env == NONE else options.conda_env,
        "variables": variables,
    }
    cluster = {
        "launcher": launcher,
        "nodes": options.num_nodes,
        "gpus_per_node": gpus,
        "environment": environment,
        "network": {"port": options.master_port},
    }
    text = _render(options, cluster, "sbatch")
    _write(options.output, text, executable=True)
    print(f"submit it: sbatch {shlex.quote(str(options.output))}")


def _render(options: argparse.Namespace, cluster: dict[str, Any], to: Any) -> str:
    """The script that `isles render` makes of a cluster whose ranks run src/train.py."""
    mapped = _check_config(options)
    own = Path("src/train.py")
    script = own if own.exists() else ROOT / own
    words = ["--config", str(options.config)]
    if options.use_deepspeed:
        words += ["--deepspeed", mapped.data["strategy"]["config_file"]]
    run = {
        "name": options.job_name or mapped.data.get("name", "llm_finetune"),
        "training": {"script": str(script), "script_args": words},
        "clusters": [cluster],
    }
    return render(load_run_file(Path("command line"), text=dump_yaml(run)), to).text


def _check_config(options: argparse.Namespace) -> Mapped:
    """What config.yaml says for these ranks: its issues are reported now, not in the job."""
    ranks = options.num_nodes * options.num_gpus_per_node
    mapped = map_config(options.config, None, ranks)
    kind = (mapped.data.get("strategy") or {}).get("kind")
    if options.use_deepspeed and kind != "deepspeed":
        mapped = map_config(options.config, Path("config/ds_config.json"), ranks)
    if kind == "deepspeed" and not options.use_deepspeed:
        _log(f"{options.config} says use_deepspeed: true, and so it trains under DeepSpeed")
    for line in mapped.said:
        _log(line)
    return mapped


def _write(path: Path, text: str, *, executable: bool = False) -> None:
    """Write a file, and say so; what was there is replaced."""
    word = "wrote"
    try:
        if path.exists():
            word = "replaced" if path.read_bytes() != text.encode() else "left as it was:"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
        if executable:
            path.chmod(0o755)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}", where=str(path), fix="name another --output"
        ) from None
    print(f"{word} {path}")


def _log(line: str) -> None:
    sys.stderr.write(f"note: {line}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Write what distributed training needs.")
    commands = parser.add_subparsers(required=True, metavar="deepspeed|fsdp|launcher|slurm")

    one = commands.add_parser("deepspeed", help="DeepSpeed's settings")
    one.set_defaults(write=write_deepspeed)
    one.add_argument("--zero_stage", type=int, choices=(1, 2, 3), default=2)
    one.add_argument("--offload_optimizer", action="store_true", help="its state on the CPU")
    one.add_argument("--offload_param", action="store_true", help="parameters on the CPU; stage 3")
    kinds = one.add_mutually_exclusive_group()
    kinds.add_argument("--bf16", action="store_true")
    kinds.add_argument("--fp16", action="store_true")
    one.add_argument("--gradient_accumulation_steps", type=_count, default=16)
    one.add_argument("--gradient_clipping", type=float, default=0.3, help="0: none")
    one.add_argument("--output", type=Path, default=Path("config/ds_config.json"))

    one = commands.add_parser("fsdp", help="FSDP's settings")
    one.set_defaults(write=write_fsdp)
    one.add_argument("--sharding_strategy", choices=fsdp_sharding(), default="FULL_SHARD")
    one.add_argument("--mixed_precision", choices=fsdp_precisions(), default="BFLOAT16")
    one.add_argument("--transformer_layer_cls_to_wrap", nargs="+", default=BLOCKS, metavar="CLASS")
    one.add_argument("--output", type=Path, default=Path("config/fsdp_config.json"))

    one = commands.add_parser("launcher", help="a script that starts the ranks of one node")
    one.set_defaults(write=write_launcher, job_name=None)
    _add_ranks(one, num_nodes=1, output="scripts/run_training.sh")
    one.add_argument("--master_addr", help="address at which the others reach node 0")
    one.add_argument("--node_rank", type=_rank, help="left out: it is typed behind the script")

    one = commands.add_parser("slurm", help="a job script for Slurm")
    one.set_defaults(write=write_slurm)
    _add_ranks(one, num_nodes=None, output="scripts/slurm_job.sh")
    one.add_argument("--time_limit", default="48:00:00", help="HH:MM:SS, or 2d")
    one.add_argument("--job_name", default="llm_finetune")
    one.add_argument("--partition", default="gpu", help="none: the cluster's default")
    one.add_argument("--account")
    one.add_argument("--gres", help="left out: gpu:GPUS; none: no GPUs are asked for")
    one.add_argument("--cpus_per_task", type=_count, default=8, help="cores for each GPU")
    one.add_argument("--mem_per_gpu", default="32G", help="none: the cluster's default")
    one.add_argument("--modules", nargs="*", default=["cuda/12.2", "anaconda3"])
    one.add_argument("--conda_env", default="llm_finetuning", help="none: this Python")
    one.add_argument("--nccl_debug", default="WARN", help="INFO floods the log; to look for faults")
    one.add_argument("--nccl_ib_disable", choices=("0", "1"), default="0")
    one.add_argument("--nccl_socket_ifname", default="^lo,docker")
    return parser


def _add_ranks(one: argparse.ArgumentParser, *, num_nodes: int | None, output: str) -> None:
    one.add_argument("--config", type=Path, default=Path("config.yaml"))
    one.add_argument("--num_nodes", type=_count, default=num_nodes, required=num_nodes is None)
    one.add_argument("--num_gpus_per_node", type=_count, required=True)
    one.add_argument("--use_deepspeed", action="store_true")
    one.add_argument("--master_port", type=_port, default=29500)
    one.add_argument("--output", type=Path, default=Path(output))


def _count(text: str) -> int:
    return _whole(text, 1, 1024)


def _rank(text: str) -> int:
    return _whole(text, 0, 1023)


def _port(text: str) -> int:
    return _whole(text, 1024, 65_435)


def _whole(text: str, least: int, most: int) -> int:
    if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from {least} to {most}")
    return int(text)


if __name__ == "__main__":
    sys.exit(told(main))
