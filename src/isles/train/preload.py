"""Imports the modules of every rank once, in the fork server that forks the ranks."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from isles.run.env import hidden, refuse_kernels
from isles.run.process import die_with_parent


def preload() -> None:
    """Import the worker and the code of the run's model. The ranks report an import that fails."""
    # A signal to the process group is for the ranks, which save; this server must survive it.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # By default the server checks whether the agent is alive only after its imports.
    die_with_parent()
    # transformers imports torchao if it is installed, and torchao queries the GPU during its
    # import. A process that has queried the GPU cannot fork ranks that compute on it.
    assert "torchao" not in sys.modules
    # The others cost half a second: the object detection loss, users of scipy, and SageMaker.
    with contextlib.suppress(Exception), hidden("torchao", "scipy", "sklearn", "boto3"):
        from isles.config.resolve import load_resolved
        from isles.run.env import RUN_DIR
        from isles.run.paths import RunDir

        run_dir = RunDir(Path(os.environ[RUN_DIR]))
        resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
        if resolved.config.training.script is not None:
            return  # which is a separate process
        refuse_kernels()
        try:
            importlib.import_module("torch")
        except Exception:  # no rank can run: end this process, and so the agent
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        import transformers

        importlib.import_module("isles.train.worker")
        from isles.models.build import load_model_config

        if not resolved.config.model.trust_remote_code:
            config = load_model_config(resolved.config.model)
            transformers.AutoModelForCausalLM._model_mapping[type(config)]
        if resolved.config.adapter.type != "none" and resolved.device == "cpu":
            # 50 MB of modules. On a GPU the ranks import them, as bitsandbytes queries the GPU.
            from isles.models.adapter import import_peft

            import_peft(resolved.config.adapter)


# Imported objects stay. Collecting them again and again costs a seventh of the time here, and would
# copy their pages in every rank (https://docs.python.org/3/library/gc.html#gc.freeze).
gc.disable()
preload()
gc.freeze()
gc.enable()
