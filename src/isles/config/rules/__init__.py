"""The rules between the keys of a run file that need nothing but the file.

Each file has the rules of some sections, as functions that yield an `Issue` for every rule that is
broken; a rule inside one section stands in its class in `sections/`. `idle.py` is the table of keys
that mean nothing beside the value of another. `shape.py` has the rules that need the model's
config.json, too, and is asked by `config/files.py`. Open `training.py` first.
"""

from __future__ import annotations

from isles.config.issues import Issue
from isles.config.rules.cluster import cluster_rules
from isles.config.rules.data import data_rules
from isles.config.rules.outer import outer_rules
from isles.config.rules.strategy import model_rules, strategy_rules
from isles.config.rules.training import script_rules, training_rules
from isles.config.sections.run import RunConfig


def check_rules(config: RunConfig) -> list[Issue]:
    """Every rule between keys that `config` breaks, as far as they need no machine to check."""
    issues = [*script_rules(config)]
    if config.training.script is None:
        issues += [
            *training_rules(config),
            *model_rules(config),
            *data_rules(config),
            *strategy_rules(config),
        ]
    return [*issues, *cluster_rules(config), *outer_rules(config)]
