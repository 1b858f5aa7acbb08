"""`export`, `generate` and `eval` of a run: `python -m isles.train.verbs VERB RUN_DIR …`.

Each command runs in one process, on the run's newest checkpoint or on `--step`.
"""

from __future__ import annotations

import argparse
import logging
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from transformers import GenerationConfig

from isles.checkpoint.export import read_trained
from isles.checkpoint.load import load_tensors, sound_checkpoint
from isles.checkpoint.upload import check_push, push
from isles.config.layout import Layout
from isles.config.memory import step_memory
from isles.config.resolve import Resolved
from isles.config.sections.output import HuggingFaceId
from isles.config.sections.run import RunConfig
from isles.config.sections.strategy import DDPStrategyConfig
from isles.config.yaml import shorten
from isles.data.chat.template import chat_prompt
from isles.data.loader import evaluation_batches
from isles.data.mix import build_validation
from isles.data.tokens.tokenizer import affixes, check_vocabulary, clear_panics
from isles.dist.batch import MIXED_DTYPE
from isles.dist.world import join_world, leave_world
from isles.errors import DataError, OutOfMemoryError, UserError
from isles.facts.memory.architecture import Architecture
from isles.facts.terminal import show_streams
from isles.facts.units import format_bytes
from isles.run.checkpoints import find_checkpoint
from isles.run.env import IN_POD, RankEnv, machine_elsewhere, refuse_kernels, shown_place
from isles.run.find import typed_name
from isles.run.limits import memory
from isles.run.paths import RunDir
from isles.run.resolved import needs_own, read_resolved
from isles.train.data import data_cache, run_tokenizer
from isles.train.finish import export_step
from isles.train.logs import log_of_verb
from isles.train.metrics import evaluate
from isles.train.model import architecture_of, empty_model, kept_base, whole_model, with_base
from isles.train.reference import give_scores
from isles.train.strategy import make_engine, resolve_mesh


def main() -> int:
    """Run one command; returns the exit code."""
    options = _parse()
    log_of_verb()
    refuse_kernels()
    run_dir = RunDir(options.run_dir)
    verbs = {"export": _export, "generate": _generate, "eval": _eval}
    try:
        resolved = read_resolved(run_dir)
        if not resolved.config.model.name_or_path or resolved.config.adapter.type != "none":
            needs_own(resolved, run_dir, "load a model that the run names")
        verbs[options.verb](options, run_dir, resolved)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return int(error.exit_code)
    except torch.OutOfMemoryError as error:
        sys.stderr.write(
            f"error: {error}\n  fix: CUDA_VISIBLE_DEVICES= isles {options.verb} … uses the CPU\n"
        )
        return 4
    except KeyboardInterrupt:
        return 130
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m isles.train.verbs")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name in ("export", "generate", "eval"):
        verb = verbs.add_parser(name)
        verb.add_argument("run_dir", type=Path)
        verb.add_argument("--step", type=int)
        match name:
            case "export":
                verb.add_argument("--output", type=Path)
                verb.add_argument("--merge-adapter", action="store_true")
                verb.add_argument("--push-to-hub")
            case "generate":
                verb.add_argument("--prompt", default="")
                verb.add_argument("--chat", action="store_true")
                verb.add_argument("--max-new-tokens", type=_positive, default=100)
                verb.add_argument("--temperature", type=float, default=0.8)
                verb.add_argument("--top-p", type=float, default=0.95)
                verb.add_argument("--seed", type=int, default=0)
            case _:
                verb.add_argument("--samples", type=_positive)
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _export(options: argparse.Namespace, run_dir: RunDir, resolved: Resolved) -> None:
    repo = options.push_to_hub
    if repo is not None:
        try:
            TypeAdapter(HuggingFaceId).validate_python(repo)
        except ValidationError:
            raise UserError(
                f"{repo!r} is not a repository name",
                where="--push-to-hub",
                fix="use owner/name",
            ) from None
        check_push(repo, where=f"--push-to-hub={repo}")
    checkpoint = sound_checkpoint(find_checkpoint(run_dir, options.step).path)
    folder, step = options.output or run_dir.model, checkpoint.step
    has_adapter = resolved.config.adapter.type != "none"
    if options.merge_adapter and not has_adapter:
        raise UserError(
            "this run did not train an adapter: its export already is a whole model",
            where="--merge-adapter",
            fix="leave it out",
        )
    tokenizer = _tokenizer(run_dir, resolved)
    config = kept_base(resolved.config, run_dir)
    empty: Any = empty_model(config, tokenizer)
    vocab_size = int(empty.config.get_text_config().vocab_size)
    if tokenizer is not None and (
        warning := check_vocabulary(tokenizer, vocab_size, is_trained=True)
    ):
        sys.stderr.write(f"warning: {warning}\n")
    merge = options.merge_adapter or None
    export_step(run_dir, resolved, tokenizer, step, folder, repo=repo, merge=merge)
    sys.stdout.write("".join(f"{line}\n" for line in exported_lines(step, folder)))
    if repo is not None:
        url = push(folder, repo, message=f"{run_dir.name}, step {step}")
        sys.stdout.write(f"uploaded to {url}\n")


def exported_lines(step: int, folder: Path) -> list[str]:
    """The lines that show the path of an export and, on another machine, how to copy it."""
    machine, there = machine_elsewhere(), shown_place(folder)
    line = f"exported step {step} to {there}"
    if machine.startswith(IN_POD):
        return [f"{line}, on the volume of the run's pods"]
    bring = f"  To copy it from that machine: scp -r {shlex.quote(there)} ."
    return [line, bring] if machine else [line]


def _generate(options: argparse.Namespace, run_dir: RunDir, resolved: Resolved) -> None:
    tokenizer = _tokenizer(run_dir, resolved)
    if tokenizer is None and any(s.type != "fake" for s in resolved.config.data.sources):
        find_checkpoint(run_dir, options.step)  # raises if there is no checkpoint yet
    if tokenizer is None:
        raise UserError(
            "this run was trained on fake data, so it has no tokenizer and has not learned any "
            "text",
            where=str(run_dir.path),
            fix="train with a real source, such as data.sources: [{path: python-docs}]",
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    has_adapter = resolved.config.adapter.type != "none"
    model, _ = _load(run_dir, resolved, options.step, device)
    torch.manual_seed(options.seed)
    with clear_panics(str(run_dir.tokenizer)):
        ids = prompt_ids(tokenizer, options.prompt, is_chat=options.chat)
    if not ids:
        raise UserError(
            "the prompt is empty, and the tokenizer has no end-of-text token to start with",
            where="--prompt",
            fix="give a prompt",
        )
    known = int(model.config.get_text_config().vocab_size)
    for token in ids:
        if token >= known:
            raise DataError(
                f"the prompt holds {tokenizer.convert_ids_to_tokens(token)!r} (token {token}), the "
                f"model knows {known} tokens",
                where="--prompt",
                fix="remove it from the prompt, or train with the model's own tokenizer",
                id="data.tokenizer",
            )
    # A 16-bit frozen model and its 32-bit adapter compute together as in training.
    dtype = MIXED_DTYPE.get(resolved.config.training.precision) if has_adapter else None
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            output = _continue(model, torch.tensor([ids], device=device), tokenizer, options)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"transformers cannot generate with this model: {shorten(str(error), 300)}",
            where=str(run_dir.path),
            fix="check --temperature and --top-p, and check that the model's config.json is "
            "unchanged",
            id="model.config",
        ) from error
    # An answer is printed alone, a continuation together with its prompt.
    first = len(ids) if options.chat else 0
    with clear_panics(str(run_dir.tokenizer)):
        text = tokenizer.decode(output[0][first:], skip_special_tokens=True)
    sys.stdout.write(text.strip("\n") + "\n")


def prompt_ids(tokenizer: Any, prompt: str, *, is_chat: bool) -> list[int]:
    """The ids of a prompt, with the same first tokens as the rows of the training data."""
    if is_chat:
        text = chat_prompt(tokenizer, prompt)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    first, _ = affixes(tokenizer)
    text = prompt if prompt or first else tokenizer.eos_token or ""
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return ids if first and ids[: len(first)] == first else [*first, *ids]


def _continue(model: Any, ids: torch.Tensor, tokenizer: Any, options: argparse.Namespace) -> Any:
    greedy = options.temperature <= 0
    # The model's files may request beam search or another way to generate.
    model.generation_config = GenerationConfig()
    settings = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=not greedy,
        temperature=None if greedy else options.temperature,
        top_p=None if greedy else options.top_p,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,  # one text needs no padding
    )
    mask = torch.ones_like(ids)
    return model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)


def _eval(options: argparse.Namespace, run_dir: RunDir, resolved: Resolved) -> None:
    config = resolved.config
    if any(source.type != "fake" for source in config.data.sources):
        needs_own(resolved, run_dir, "read the data that the run names")
    tokenizer = _tokenizer(run_dir, resolved)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    env = RankEnv(rank=0, local_rank=0, world_size=1, local_world_size=1, attempt=0, store=None)
    world = join_world(env, device=kind, timeout_s=600)
    try:
        model, step = _load(run_dir, resolved, options.step, world.device)
        validation = build_validation(
            config.data,
            tokenizer,
            data_cache(config.data),
            seed=config.seed,
            vocab_size=int(model.config.get_text_config().vocab_size),
            progress=lambda text: logging.getLogger(__name__).info("%s", text),
            pairs=config.training.method == "dpo",
        )
        if validation is None:
            raise UserError(
                "this run has no validation data",
                where="data.validation_fraction: 0",
                fix="set data.validation_fraction and train again",
            )
        num_samples = min(
            options.samples or config.training.eval_samples or validation.num_samples,
            validation.samples_per_epoch,
        )
        if config.training.method == "dpo":
            give_scores(validation, num_samples, run_dir.reference("validation"))
        strategy = DDPStrategyConfig()
        mesh = resolve_mesh(strategy, world)
        engine = make_engine(strategy, model, lambda _: None, lambda _: [], mesh, world, config)
        batches = evaluation_batches(
            validation,
            num_samples,
            micro_batch_size=8,
            dp_rank=0,
            dp_size=1,
            device=world.device,
        )
        figures = evaluate(engine, batches, world, counts=True)
    finally:
        leave_world()
    text = f"step {step}: validation loss {figures['loss']:.4f}, "
    if "pairs" in figures:
        text += f"chosen preferred {figures['reward_accuracy']:.0%}, "
        text += f"margin {figures['reward_margin']:.3f}, {figures['pairs']:.0f} pairs"
    else:
        perplexity = figures["perplexity"]
        shown = f"{perplexity:.2f}" if math.isfinite(perplexity) else "inf"
        text += f"perplexity {shown}, {figures['tokens']:.0f} tokens"
    sys.stdout.write(f"{text}\n")


def _load(
    run_dir: RunDir, resolved: Resolved, step: int | None, device: torch.device
) -> tuple[Any, int]:
    # The model with a checkpoint's weights, and the checkpoint's step.
    checkpoint = sound_checkpoint(find_checkpoint(run_dir, step).path)
    config = kept_base(resolved.config, run_dir)
    tokenizer = _tokenizer(run_dir, resolved)
    has_adapter = config.adapter.type != "none"
    if has_adapter:
        config = with_base(config, checkpoint)
    check_room(config, architecture_of(empty_model(config, tokenizer)), device, run_dir)
    if has_adapter:
        adapted: Any = whole_model(config, tokenizer, device)
        read_trained(adapted, checkpoint.path)
        return adapted.eval(), checkpoint.step
    # The weights come from the checkpoint, not from the run's start.
    fresh = config.model.model_copy(update={"init": "scratch"})
    model: Any = whole_model(config.model_copy(update={"model": fresh}), tokenizer, device)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    load_tensors(state, checkpoint.path, alone=True)
    model.tie_weights()
    return model.eval(), checkpoint.step


def check_room(
    config: RunConfig, model: Architecture, device: torch.device, run_dir: RunDir
) -> None:
    """Check that a whole model fits on one device, which may hold only a part of it in training.

    Raises:
        OutOfMemoryError: the weights need more than the free memory.
    """
    alone = Layout(1, 1, 1, 1, 1)
    needed = step_memory(model, config, DDPStrategyConfig(), alone, rows=1).peak.weights
    main = memory().available
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else main
    if needed <= free:
        return
    where = "the GPU" if device.type == "cuda" else "main memory"
    bits = "in 4 bits " if config.adapter.type == "qlora" else ""
    fix = f"run this command on a machine with {format_bytes(needed)} of free memory"
    if device.type == "cuda" and needed <= main:
        fix = "put CUDA_VISIBLE_DEVICES= before this command: it then uses main memory, which has "
        fix += f"{format_bytes(main)} free"
    if config.adapter.type != "none":
        fix += f". `isles checkpoint export {typed_name(run_dir)}` exports the adapter without "
        fix += "loading the model"
    raise OutOfMemoryError(
        f"this command loads the whole model {bits}on one device: its weights need "
        f"{format_bytes(needed)}, and {format_bytes(free)} are free",
        where=where,
        fix=fix,
        id="memory.whole",
    )


def _tokenizer(run_dir: RunDir, resolved: Resolved) -> Any:
    if not run_dir.tokenizer.is_dir():
        return None
    return run_tokenizer(resolved.config, run_dir)


if __name__ == "__main__":
    show_streams()
    sys.exit(main())
