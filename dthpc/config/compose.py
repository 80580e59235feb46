"""Hydra's side of the doors: reads the command line, composes the configuration, and words what the user got wrong."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc.errors import UserError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_NAME = "config"

_OPTIONS_WITH_VALUE = {"--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"}
_OPTIONS_WITH_VALUE |= {"--config-dir", "-cd", "--experimental-rerun"}
_OPTIONS = _OPTIONS_WITH_VALUE | {"--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun"}
_OPTIONS |= {"-m", "--shell-completion", "-sc", "--info", "-i", "--"}


@dataclass(frozen=True)
class Choices:
    """What a configuration was composed of."""

    options: Mapping[str, str]
    """The option that Hydra took in each group."""

    typed: frozenset[str]
    """Keys that the command line names, groups too."""


def config_folder() -> Path:
    """The folder of YAML groups: inside the package once installed, at the top of the repository in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / f"{CONFIG_NAME}.yaml").is_file():
            return folder
    raise UserError(
        "the configuration files of dthpc are missing",
        key="conf",
        value=package / "conf",
        instead="install the package again, or run from a complete checkout",
    )


def register_schema() -> None:
    """Make the typed schemas known to Hydra, for the defaults lists of the YAML files."""
    from hydra.core.config_store import ConfigStore

    from dthpc.config.jobs import CollectivesJob
    from dthpc.config.preflight import PreflightJob
    from dthpc.config.schema import Config, GPTModel, TextDataFields

    store = ConfigStore.instance()
    store.store(name="schema", node=Config, provider="dthpc")
    store.store(group="model", name="gpt_fields", node=GPTModel, provider="dthpc")
    store.store(group="data", name="text_fields", node=TextDataFields, provider="dthpc")
    store.store(name="collectives_fields", node=CollectivesJob, provider="dthpc")
    store.store(name="preflight_fields", node=PreflightJob, provider="dthpc")


def read_command_line(argv: list[str], program: str) -> tuple[list[tuple[DictConfig, Choices]], bool]:
    """Compose the configurations that a command line asks for.

    Args:
        argv: the words after the program's name.
        program: what the user typed to get here, for help texts.

    Returns:
        Each run's configuration (several under `--multirun`), with the choices that made it; and whether this is a
        sweep. Empty when the command line only asked for information (`--help`, `--cfg`, …), which has then been
        printed.

    Raises:
        UserError: an unknown key, group, option, or a value of the wrong type, with the nearest valid ones.
    """
    _refuse_strange_options(argv)
    argv = _options_first(argv)
    register_schema()
    with _command_line(program, argv), _hydra_raises():
        try:
            if _is_plain(argv):
                return [_compose_one(argv)], False
            with _sweep_folder():
                return _run_hydra(_typed(argv))
        except SystemExit as end:
            if end.code not in (0, None):
                raise
            return [], False
        except Exception as error:
            raise _worded(error, argv) from error


def _refuse_strange_options(argv: list[str]) -> None:
    """Refuse words with dashes that Hydra's parser does not have; it would answer with its whole usage."""
    words = iter(argv)
    for word in words:
        option, sign, value = word.partition("=")
        if not word.startswith("-") or any(known.startswith(option) for known in _OPTIONS if option.startswith("--")):
            continue
        if option in _OPTIONS:
            if option in _OPTIONS_WITH_VALUE and not sign:
                next(words, None)
            continue
        key = option.lstrip("-").replace("-", "_")
        entries = {entry.stem for entry in config_folder().iterdir()} | {"cluster", "run", "follow", "dry_run", "json"}
        meant = key.partition(".")[0] in entries
        instead = f"{key}={value or 'true'}, without dashes" if meant else nearest(option, _OPTIONS)
        raise UserError("there is no such option", key=option, value=value or None, instead=instead)


def _options_first(argv: list[str]) -> list[str]:
    """The words with options before overrides: Hydra's parser takes them there, but not in between."""
    options: list[str] = []
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("-"):
            overrides.append(word)
            continue
        options.append(word)
        if word in _OPTIONS_WITH_VALUE:
            options += [value for value in [next(words, None)] if value is not None]
    # A sweep may be asked for twice; an option whose value may be left out must not take an override for it.
    options = list(dict.fromkeys(options)) if "-m" in options else options
    return [*overrides, *options] if options and options[-1] in ("--info", "-i") else [*options, *overrides]


def _is_plain(argv: list[str]) -> bool:
    """Whether the words are overrides of one run and nothing else."""
    return not any(word.startswith(("-", "hydra.")) for word in argv)


def _typed(argv: list[str]) -> frozenset[str]:
    """Keys that overrides set; what they delete is not there."""
    words = (word for word in argv if "=" in word and not word.startswith(("-", "~", "hydra.")))
    return frozenset(word.lstrip("+").partition("=")[0] for word in words)


def _compose_one(argv: list[str]) -> tuple[DictConfig, Choices]:
    # `hydra.main` composes twice, the first time only to learn whether this is a sweep. On the login node the second
    # time is a good part of all that is spent.
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict, read_write

    with initialize_config_dir(str(config_folder()), version_base="1.3", job_name="submit"):
        config = compose(CONFIG_NAME, overrides=argv, return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        choices = _choices(config.hydra, _typed(argv))
    with read_write(config), open_dict(config):
        del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config, choices


def _run_hydra(typed: frozenset[str]) -> tuple[list[tuple[DictConfig, Choices]], bool]:
    import hydra
    from hydra.core.hydra_config import HydraConfig

    found: list[tuple[DictConfig, Choices]] = []
    sweep = False

    def collect(config: DictConfig) -> None:
        nonlocal sweep
        # Launching waits until Hydra has composed the whole sweep: one job array, and all mistakes in one report.
        runtime = HydraConfig.get()
        sweep = str(runtime.mode).endswith("MULTIRUN")
        found.append((config, _choices(runtime, typed)))

    hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIG_NAME)(collect)()
    return found, sweep


def _choices(hydra_config: Any, typed: frozenset[str]) -> Choices:
    taken = hydra_config.runtime.choices.items()
    return Choices({str(key): str(value) for key, value in taken if value is not None}, typed)


@contextmanager
def _sweep_folder() -> Iterator[None]:
    # Hydra's sweeper insists on a folder for a file of its own; a run keeps its configuration in its own folder.
    with tempfile.TemporaryDirectory(prefix="dthpc-sweep-") as folder:
        os.environ["DTHPC_SWEEP_FOLDER"] = folder
        try:
            yield
        finally:
            del os.environ["DTHPC_SWEEP_FOLDER"]


@contextmanager
def _command_line(program: str, argv: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [program, *argv]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _hydra_raises() -> Iterator[None]:
    # Hydra prints errors and exits by itself unless this is set; dthpc words them and adds the nearest valid names.
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before


def _worded(error: Exception, argv: list[str]) -> Exception:
    """The same error as a `UserError` where it is the user's; any other error unchanged."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    at: BaseException | None = error
    while at is not None:
        if isinstance(at, KeyboardInterrupt):
            raise KeyboardInterrupt from error  # Ctrl-C met OmegaConf, which made an error of its own of it
        at = at.__cause__ or at.__context__
    if "Config group override must be" in str(error):
        return _no_option(argv)
    if isinstance(error, UserError) or not isinstance(error, (HydraException, OmegaConfBaseException)):
        return error
    causes: list[Exception] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    for word_it in (_wrong_override, _unknown_key, _unknown_option):
        worded = word_it(causes, argv)
        if worded is not None:
            return worded
    # The innermost message says what is wrong; the outer ones say only that composing failed.
    said = [_first_line(str(cause)) for cause in causes if str(cause).strip()]
    return UserError("; ".join(dict.fromkeys(said)) or type(error).__name__, instead="see --help and --cfg job")


def _no_option(argv: list[str]) -> UserError:
    """A group that was given a number, null or the like where the name of an option goes."""
    groups = {entry.name for entry in config_folder().iterdir() if entry.is_dir()}
    words = [word.lstrip("+~").partition("=") for word in argv]
    key, value = next(((key, value) for key, sign, value in words if sign and key in groups), ("a group", "…"))
    instead = f"the name of a file in conf/{key}, or set keys of the group: {key}.KEY=VALUE"
    return UserError("a group takes the name of an option", key=key, value=value, instead=instead)


def _wrong_override(causes: list[Exception], argv: list[str]) -> UserError | None:
    """An override that does not parse, that holds several values outside a sweep, or a value of the wrong type."""
    outer = str(causes[0])
    parse = next((c for c in causes if type(c).__name__ == "OverrideParseException"), None)
    if parse is not None:
        word = str(getattr(parse, "override", ""))
        key, sign, value = word.partition("=")
        if sign and ":" in key:
            instead = f"{key.replace(':', '.')}={value}"
            return UserError("keys are joined by dots", key=key, value=value, instead=instead)
        if value.startswith("="):
            return UserError("one sign is enough", key=key, value=value, instead=f"{key}={value.lstrip('=')}")
        if sign and value:
            why, instead = "this value can't be read as it stands", f"quote it: '{key}=\"{value}\"'"
            return UserError(why, key=key, value=value, instead=instead)
        return UserError("this word is neither an option nor key=value", key=word, instead="write key=value")
    twice = re.search(r"Multiple values for ([\w/]+)", outer)
    if twice is not None:
        key = twice.group(1)
        value = next((word.split("=", 1)[1] for word in argv if word.startswith(f"+{key}=")), "…")
        return UserError(
            "an option of this group is chosen already", key=key, value=value, instead=f"write {key}={value}"
        )
    ambiguous = re.search(r"Ambiguous value for argument '([^']+)'", outer)
    if ambiguous is not None:
        key, _, value = ambiguous.group(1).partition("=")
        one = f"write '{key}=[{value}]' for a list, or '{key}=\"{value}\"' for one text"
        one = "choose one of them" if (config_folder() / key).is_dir() else one
        instead = f"add -m for one run each, or {one}"
        return UserError("several values, but only one run was asked", key=key, value=value, instead=instead)
    merging = re.search(r"Error merging override ([^=]+)=(.*)", outer)
    wrong_type = next((str(c) for c in causes if type(c).__name__ == "ValidationError"), None)
    if merging is not None and wrong_type is not None:
        if "ListConfig" in wrong_type:
            key, value = merging.group(1), merging.group(2)
            return UserError("a list is wanted", key=key, value=value, instead=f"write '{key}=[{value}]'")
        if keys := _keys_below(merging.group(1)):
            why = f"it is a group of keys: {', '.join(keys)}"
            instead = f"set one of them: {merging.group(1)}.{keys[0]}=…"
            return UserError(why, key=merging.group(1), value=merging.group(2), instead=instead)
        wanted = "it a value; null has no meaning here" if "is not Optional" in wrong_type else _kind_wanted(wrong_type)
        return UserError("wrong type of value", key=merging.group(1), value=merging.group(2), instead=f"give {wanted}")
    if merging is not None and re.search(r"Cannot merge DictConfig with|Key .* is incompatible with", str(causes[-1])):
        key, value = merging.group(1).lstrip("+"), merging.group(2)
        if value.startswith("{") and "Cannot merge" in str(causes[-1]):
            return UserError("a list is wanted", key=key, value=value, instead=f"write '{key}=[VALUE]'")
        return UserError("names with values are wanted", key=key, value=value, instead=f"write +{key}.NAME=VALUE")
    return None


def _kind_wanted(told: str) -> str:
    """The kind of value that OmegaConf's words about a wrong one ask for."""
    kinds = {
        "Integer|is not a valid int": "a whole number",
        "Float|is not a valid float": "a number",
        "Boolean|valid bool": "true or false",
        "String|to string": "one text, not a list",
        "to Dict|DictConfig|is not a Dict|to dict": "names with values: {NAME: VALUE}",
    }
    return next((kind for words, kind in kinds.items() if re.search(words, told)), "a value of another kind")


def _unknown_key(causes: list[Exception], argv: list[str]) -> UserError | None:
    match = re.search(r"Could not override '([^']+)'", str(causes[0]))
    if match is None:
        return None
    key = match.group(1)
    value = next((word.split("=", 1)[1] for word in argv if word.startswith(f"{key}=")), None)
    if "No match in the defaults list" in str(causes[0]):
        return UserError(
            "no default is set for this group",
            key=key,
            value=value,
            instead=f"write +{key}={value or '…'}, with a plus sign",
        )
    detail = next((str(c) for c in causes[1:] if type(c).__name__ == "ValidationError"), None)
    if detail is not None:
        return UserError(_first_line(detail), key=key, value=value, instead="give a value of that type")
    if key.lstrip("+") == "comm.axes.dp":
        instead = "comm.axes.replicate (whole replicas) or comm.axes.shard (ZeRO)"
        return UserError("data parallelism is two axes", key=key, value=value, instead=instead)
    parent, known = _nearest_parent(key, _group_choices(argv))
    wrong = key.removeprefix(f"{parent}." if parent else "").split(".")[0]
    if wrong in known:
        if strange := _strange_name(causes, key):
            return strange
        instead = f"write '+{key}={value}', with a plus sign: {key} takes names of your own"
        return UserError("it has none of these names yet", key=key, value=value, instead=instead)
    if "/" in key:
        instead = f"{key.replace('/', '.')}={value}"
        return UserError("keys are joined by dots", key=key, value=value, instead=instead)
    if not known:
        instead = f"write +{key}={value if value is not None else '…'}, with a plus sign: {parent} takes any key"
        return UserError("there is no such key yet", key=key, value=value, instead=instead)
    return UserError(
        "there is no such key",
        key=key,
        value=value,
        instead=f"{nearest(wrong, known)} (a new key for a class of your own is written with a plus: +{key}=…)",
    )


def _strange_name(causes: list[Exception], key: str) -> UserError | None:
    """A name in `group={name: value}` that a group of fixed keys does not have."""
    found = [match for cause in causes if (match := re.search(r"Key '([^']+)' not in '\w+'", str(cause)))]
    keys = _keys_below(key) if found else []
    if not keys:
        return None
    return UserError(
        "there is no such key", key=f"{key}.{found[-1].group(1)}", instead=nearest(found[-1].group(1), keys)
    )


def _unknown_option(causes: list[Exception], argv: list[str]) -> UserError | None:
    for cause in causes:
        folder = re.search(r"Additional config directory '([^']+)' not found", str(cause))
        if folder is not None:
            instead = "a folder with one folder for each group, such as cluster/ or model/"
            return UserError("there is no such folder", key="--config-dir", value=folder.group(1), instead=instead)
        missing = getattr(cause, "missing_cfg_file", None)
        options = getattr(cause, "options", None)
        if missing and options:
            group, _, option = str(missing).rpartition("/")
            return UserError(
                "there is no such option of this group",
                key=group or "--config-name",
                value=option,
                instead=nearest(option, options),
            )
        unknown = re.search(r"Could not find '([^']+)'", str(cause))
        if unknown is not None:
            name, _, option = unknown.group(1).rpartition("/")
            groups = [entry.name for entry in config_folder().iterdir() if entry.is_dir()]
            return UserError(
                "there is no such group of configurations",
                key=name or unknown.group(1),
                value=option or None,
                instead=nearest(name or unknown.group(1), groups),
            )
    return None


def _keys_below(key: str) -> list[str]:
    """The keys that a group of keys holds; none for a key with a value of its own."""
    parent, known = _nearest_parent(f"{key}.…")
    return known if parent == key else []


def _group_choices(argv: list[str]) -> list[str]:
    """The words that choose an option of a group of this package, such as `job=collectives`."""
    chosen = [word for word in argv if re.fullmatch(r"\+?[\w/]+=[\w/]+", word)]
    return [word for word in chosen if (config_folder() / f"{word.lstrip('+').replace('=', '/')}.yaml").is_file()]


def _nearest_parent(key: str, choices: list[str] | None = None) -> tuple[str, list[str]]:
    """The deepest part of a dotted key that exists in the configuration of some choices, and the keys it holds."""
    from hydra import compose, initialize_config_dir
    from omegaconf import DictConfig, OmegaConf

    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose(CONFIG_NAME, overrides=choices)
    parts = key.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        parent = ".".join(parts[:depth])
        node = OmegaConf.select(config, parent) if parent else config
        if isinstance(node, DictConfig):
            return parent, [str(name) for name in node]
    return "", []


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else ""
