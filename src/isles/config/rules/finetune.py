"""The rules between the keys that say what is fine-tuned, on what data, and how."""

from __future__ import annotations

from collections.abc import Iterator

from isles.config.issue import Violation
from isles.config.rules.adapter import adapter_rules
from isles.config.rules.packing import packing_rules
from isles.config.sections.run import RunConfig
from isles.config.sections.track import MLflowConfig, tracker_sections


def finetune_rules(config: RunConfig) -> Iterator[Violation]:
    """Every rule about adapters, kinds of data and methods that is broken."""
    yield from adapter_rules(config)
    yield from packing_rules(config)
    yield from _stochastic_rounding(config)
    yield from _eight_bits(config)
    yield from _streaming(config)
    yield from _dpo(config)
    yield from _trackers(config)
    yield from _push_to_hub(config)


def _stochastic_rounding(config: RunConfig) -> Iterator[Violation]:
    training = config.training
    if not training.stochastic_rounding:
        return
    if training.precision != "bf16-true":
        yield Violation(
            ("training.stochastic_rounding", "training.precision"),
            f"stochastic_rounding is for weights in bf16, and precision {training.precision} keeps "
            "them in fp32",
            "delete it, or use precision: bf16-true",
        )
    if training.optimizer not in ("adamw", "adamw_8bit"):
        yield Violation(
            ("training.stochastic_rounding", "training.optimizer"),
            f"optimizer {training.optimizer} does not round stochastically",
            "delete it, or use optimizer: adamw or adamw_8bit",
        )


def _streaming(config: RunConfig) -> Iterator[Violation]:
    """What an endless stream, which no one has counted, does not go with."""
    data, epochs = config.data, config.training.num_train_epochs
    if not data.streaming:
        return
    if all(source.type == "fake" for source in data.sources):
        yield Violation(
            ("data.streaming", "data.sources.0.type"),
            "fake data is made up as it is needed: there is nothing to stream",
            "delete streaming: true",
        )
        return
    if epochs is not None:
        yield Violation(
            ("training.num_train_epochs", "data.streaming"),
            f"num_train_epochs {epochs:g} cannot be told in steps: data that streams is not "
            "counted before",
            "use max_steps or max_time",
        )
    if len(data.sources) > 1 and any(source.weight is None for source in data.sources):
        yield Violation(
            ("data.sources", "data.streaming"),
            f"how much of each of {len(data.sources)} sources is read cannot follow from their "
            "sizes: data that streams is not counted before",
            "give every source a weight; weight: 1 for each reads them in equal shares",
        )


def _eight_bits(config: RunConfig) -> Iterator[Violation]:
    if config.training.optimizer == "adamw_8bit" and config.strategy.kind == "deepspeed":
        yield Violation(
            ("training.optimizer", "strategy.kind"),
            "adamw_8bit codes matrices row by row, and deepspeed cuts them into flat pieces",
            "use strategy: {kind: fsdp}, or optimizer: adamw with strategy.offload_optimizer: cpu",
        )


def _dpo(config: RunConfig) -> Iterator[Violation]:
    """What a method that compares the scores of whole answers does not go with."""
    training, strategy = config.training, config.strategy
    if training.method != "dpo":
        for key, default in (("dpo_beta", 0.1), ("dpo_label_smoothing", 0.0)):
            if (value := getattr(training, key)) != default:
                yield Violation(
                    (f"training.{key}", "training.method"),
                    f"{key} {value:g} means nothing to method {training.method}",
                    "delete it, or use method: dpo",
                )
        return
    for key, what in (("pp_size", "stages"), ("cp_size", "pieces of a sequence")):
        if (size := getattr(strategy, key, 1)) > 1:
            yield Violation(
                (f"strategy.{key}", "training.method"),
                f"dpo needs the score of a whole answer on one rank, and {key} {size} deals {what} "
                "over ranks",
                f"set {key}: 1; fsdp, deepspeed and tp_size share the memory too",
            )
    if config.data.streaming:
        yield Violation(
            ("data.streaming", "training.method"),
            "dpo scores every pair once before training, and a stream is not known beforehand",
            "delete streaming: true",
        )


def _trackers(config: RunConfig) -> Iterator[Violation]:
    """Trackers that stand twice, and addresses that no tracker may have."""
    seen: set[str] = set()
    for index, tracker in enumerate(tracker_sections(config.track)):
        at = f"track.{index}"
        if tracker.kind in seen:
            yield Violation(
                (f"{at}.kind", at, "track"), f"{tracker.kind} stands twice", "keep one of them"
            )
        seen.add(tracker.kind)
        if isinstance(tracker, MLflowConfig) and tracker.tracking_uri is not None:
            yield from _tracking_uri(f"{at}.tracking_uri", tracker.tracking_uri)


def _tracking_uri(key: str, uri: str) -> Iterator[Violation]:
    scheme, separator, rest = uri.partition("://")
    if not separator and uri != "databricks":
        yield Violation(
            (key,),
            f"tracking_uri {uri} has no scheme, and MLflow would take it for a folder",
            f"write http://{uri}, or file:///... for a folder",
        )
    elif "@" in rest.partition("/")[0] and not scheme.startswith("databricks"):
        host = rest.rpartition("@")[2]
        yield Violation(
            (key,),
            f"tracking_uri {scheme}://...@{host} holds a user name or a password, and run files "
            "are copied into run directories, trackers and model cards",
            f"write {scheme}://{host}, and set MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD in the environment",
        )


def _push_to_hub(config: RunConfig) -> Iterator[Violation]:
    checkpoint = config.checkpoint
    if checkpoint.push_to_hub is not None and not checkpoint.export_on_finish:
        yield Violation(
            ("checkpoint.push_to_hub", "checkpoint.export_on_finish"),
            "push_to_hub uploads the export, and export_on_finish is false",
            "delete one of the two lines",
        )
