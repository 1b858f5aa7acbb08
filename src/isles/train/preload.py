"""Imports what every rank needs, once, in the fork server from which the ranks are forked."""

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
    """Import the worker and the code of the run's model; what fails is left to the ranks."""
    # A signal to the whole process group is for the ranks, which save; this server must live.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # By itself it looks for the end of the agent only after its imports.
    die_with_parent()
    # transformers imports torchao where it is installed, which asks the GPU what it can do as it is
    # imported. A process that has done so cannot fork ranks that compute on the GPU.
    assert "torchao" not in sys.modules
    # The others take half a second: the loss of object detection, what needs scipy, SageMaker.
    with contextlib.suppress(Exception), hidden("torchao", "scipy", "sklearn", "boto3"):
        from isles.config.resolve import load_resolved
        from isles.run.env import RUN_DIR
        from isles.run.paths import RunDir

        run_dir = RunDir(Path(os.environ[RUN_DIR]))
        resolved = load_resolved(run_dir.resolved.read_text(encoding="utf-8"))
        if resolved.config.training.script is not None:
            return  # which is a process of its own
        refuse_kernels()
        try:
            importlib.import_module("torch")
        except Exception:  # no rank can do without: end this process, and so the agent
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        import transformers

        importlib.import_module("isles.train.worker")
        from isles.models.build import load_model_config

        if not resolved.config.model.trust_remote_code:
            config = load_model_config(resolved.config.model)
            transformers.AutoModelForCausalLM._model_mapping[type(config)]


# What is imported stays: looking through it for garbage again and again takes a seventh of the time
# here, and would copy its pages in every rank (https://docs.python.org/3/library/gc.html#gc.freeze).
gc.disable()
preload()
gc.freeze()
gc.enable()
