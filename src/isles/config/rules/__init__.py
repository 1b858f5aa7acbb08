"""The rules between the keys of a run file that need only the file.

Each file has the rules of some sections, as functions that yield an `Issue` for every broken rule.
A rule within one section is in the section's class in `sections/`. `idle.py` is the table of keys
without effect under the value of another key. `shape.py` has the rules that also need the model's
config.json, for `config/files.py`. Open `training.py` first.
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
    """Every broken rule between keys, among the rules that need no machine."""
    issues = [*script_rules(config)]
    if config.training.script is None:
        issues += [
            *training_rules(config),
            *model_rules(config),
            *data_rules(config),
            *strategy_rules(config),
        ]
    return [*issues, *cluster_rules(config), *outer_rules(config)]
