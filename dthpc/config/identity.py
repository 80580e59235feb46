"""What makes two configurations the same piece of research work, and the name that follows from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

# Parts of the configuration that decide which parameters come out, up to rounding. What is not listed may change
# between the attempts of a run: where it runs, how often it saves and evaluates, what it records.
RESULT_KEYS = (
    "job",
    "model",
    "loss",
    "data",
    "train.steps",
    "train.seq_len",
    "train.global_batch",
    "train.grad_clip",
    "optim",
    "precision",
    "run.seed",
)
# Parts that also decide the last bits: a default name is taken from these as well, so that a run on a cluster is
# another run than the one here.
LAYOUT_KEYS = ("train.micro_batch", "parallel", "cluster.kind", "cluster.nodes", "cluster.tasks_per_node")
# Inside those parts: where a cache lies and how many helpers read it decide nothing.
IRRELEVANT = ("data.cache_dir", "data.workers")


def result_values(config: dict[str, Any], keys: tuple[str, ...] = RESULT_KEYS) -> dict[str, Any]:
    """The leaves of a resolved configuration that decide its result, as dotted keys and plain values."""
    leaves: dict[str, Any] = {}
    for key in keys:
        _flatten(key, _select(config, key), leaves)
    return {key: value for key, value in leaves.items() if not key.startswith(IRRELEVANT)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """How the result-deciding values of two resolved configurations differ, one `key: old → new` each."""
    old, new = result_values(before), result_values(after)
    return [f"{key}: {old.get(key)} → {new.get(key)}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]


def default_name(config: dict[str, Any], options: Mapping[str, str]) -> str:
    """A run's name where the user gave none: readable, and the same for the same command.

    Args:
        config: the resolved configuration, without a name.
        options: the option that Hydra took in each group.
    """
    values = result_values(config, RESULT_KEYS + LAYOUT_KEYS)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:8]
    job = options.get("job") or _last_word(config.get("job"))
    model = options.get("model") or _last_word(config.get("model"))
    return f"{job}-{model}-{digest}".replace("/", "_")


def _last_word(node: Any) -> str:
    target = node.get("_target_", "") if isinstance(node, dict) else ""
    return str(target).rpartition(".")[2].lower() or "run"


def _select(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _flatten(prefix: str, value: Any, into: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            _flatten(f"{prefix}.{key}", inner, into)
    else:
        into[prefix] = value
