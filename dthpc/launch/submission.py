"""From composed configurations to started runs: all is checked first, then written, then started, or nothing is."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dthpc.attempt.plan import LaunchPlan
from dthpc.config.checks import find_mistakes
from dthpc.config.identity import default_name, differences
from dthpc.errors import UserError, raise_together
from dthpc.launch.planning import make_plan
from dthpc.launch.preflight import judge_launch
from dthpc.launch.site import Site, probe
from dthpc.launch.verdicts import Verdict
from dthpc.monitor.events import EventLog
from dthpc.rundir import RunDir
from dthpc.slurm.client import SlurmClient
from dthpc.watch.report import RunReport
from dthpc.watch.survey import is_run, quick_client, survey

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Prepared:
    """A run that was checked and planned, and has not been started."""

    run: RunDir
    """Its folder, which may not exist yet."""

    config: DictConfig
    """The configuration, resolved and with a name."""

    plan: LaunchPlan | None
    """How its ranks start; None where mistakes leave nothing to plan."""

    verdicts: list[Verdict]
    """What each check said."""

    earlier: RunReport | None
    """What is known of it, where it exists already."""

    changed: bool
    """Whether it existed with a configuration that gave another result."""

    @property
    def errors(self) -> list[UserError]:
        """What must be mended before it can start."""
        return [verdict.error for verdict in self.verdicts if verdict.error is not None]

    @property
    def warnings(self) -> list[str]:
        """What the user should know."""
        return [verdict.note for verdict in self.verdicts if verdict.status == "warning"]

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to do."""
        return self.earlier is not None and self.earlier.state == "finished" and not self.changed


def ask_site(configs: Sequence[DictConfig]) -> Site | None:
    """The Slurm site, asked once for all runs; None where no run needs one."""
    wanting = [config for config in configs if config.cluster.kind in ("slurm", "allocation")]
    return probe(SlurmClient(), wanting[0].cluster.qos) if wanting else None


def prepare(found: Sequence[tuple[DictConfig, dict[str, str]]]) -> tuple[list[Prepared], Site | None]:
    """Check configurations and plan their runs; nothing is written.

    Args:
        found: configurations with the options that Hydra took in each group.

    Returns:
        The runs, whose `errors` tell what the machine or the site would refuse; and the site.

    Raises:
        UserError: all mistakes in the configurations, together; the site does not answer; a name is taken.
    """
    resolved = [_resolve(config, choices) for config, choices in found]
    # Mistakes of the configuration come first: with them, what the site says would only confuse.
    refuse([error for config in resolved for error in find_mistakes(config)])
    _refuse_doubles(resolved)
    site = ask_site(resolved)
    return [_plan(config, site) for config in resolved], site


def refuse(errors: Sequence[UserError]) -> None:
    """Raise mistakes together, each once: the runs of a sweep share most of them."""
    raise_together({error.message(): error for error in errors}.values())


def start(prepared: Sequence[Prepared], site: Site | None) -> list[Any]:
    """Write the runs' folders and start the runs: one job, one job array, or one local process after another.

    Args:
        prepared: the runs.
        site: the site that was asked.

    Returns:
        submitit's job objects, in the order of the runs.

    Raises:
        UserError: a check found mistakes, a folder can't be written, or Slurm refuses; runs that are new leave nothing
            behind then.
    """
    refuse([error for item in prepared for error in item.errors])
    planned = [(item, item.plan) for item in prepared if item.plan is not None]
    new = [item.run for item in prepared if not item.run.path.exists()]
    try:
        for item, plan in planned:
            _write(item, plan)
        jobs = _executor(*planned[0], site).launch([(item.run, plan) for item, plan in planned])
        for (item, plan), job in zip(planned, jobs, strict=True):
            _record(item, plan, str(job.job_id))
    except OSError as error:
        _forget(new)
        raise UserError(
            f"can't be written: {error.strerror}",
            key="run.root",
            value=error.filename or prepared[0].run.path.parent,
            instead="run.root=FOLDER, a folder with room that you may write",
        ) from error
    except BaseException:
        _forget(new)
        raise
    return list(jobs)


def _resolve(config: DictConfig, choices: dict[str, str]) -> DictConfig:
    """The configuration with every interpolation resolved and every name given."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if not OmegaConf.missing_keys(config):
            OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise UserError(
            str(error).strip().splitlines()[0], key=getattr(error, "full_key", None), instead="see --cfg job"
        ) from error
    if config.run.name is None:
        plain = OmegaConf.to_container(config, throw_on_missing=False)
        assert isinstance(plain, dict)
        config.run.name = default_name({str(key): value for key, value in plain.items()}, choices)
    config.run.root = os.path.abspath(Path(config.run.root).expanduser())
    source = config.data.get("source") if hasattr(config.data, "get") else None
    if source is not None and hasattr(source, "get") and isinstance(source.get("path"), str):
        # The same command must mean the same text wherever the run goes on.
        source.path = os.path.abspath(Path(source.path).expanduser())
    return config


def _plan(config: DictConfig, site: Site | None) -> Prepared:
    run = RunDir(Path(config.run.root) / config.run.name)
    earlier, changed = _earlier(run, config)
    verdicts = judge_launch(config, site)
    refused = any(verdict.status == "error" for verdict in verdicts)
    return Prepared(run, config, None if refused else make_plan(config, run, site), verdicts, earlier, changed)


def _earlier(run: RunDir, config: DictConfig) -> tuple[RunReport | None, bool]:
    """What is known of a run that exists, and whether this configuration asks for another result than before.

    Raises:
        UserError: the folder is no run's, the change was not accepted, or the run has not ended.
    """
    if not run.path.exists():
        return None, False
    if not run.path.is_dir() or (any(run.path.iterdir()) and not is_run(run.path)):
        raise UserError(
            "something that is no run lies there",
            key="run.name",
            value=run.path,
            instead="another run.name or run.root",
        )
    if not run.config.exists():
        return None, False
    changed = _changes(run, config)
    if changed and config.run.on_change != "accept":
        raise UserError(
            f"this name is taken by a run with another configuration ({'; '.join(changed)})",
            key="run.name",
            value=run.name,
            instead="another run.name, the old values, or run.on_change=accept to go on from its checkpoint with these",
        )
    slurm = quick_client() if shutil.which("squeue") else None
    report = survey([run], slurm)[0]
    if not report.ended:
        job = f" as job {report.job_id}" if report.job_id and report.kind == "slurm" else ""
        raise UserError(
            f"this run is {report.state} already{job}",
            key="run.name",
            value=run.name,
            instead=f"follow it with `python -m dthpc.status {run.path} --watch`, or choose another run.name",
        )
    return report, bool(changed)


def _changes(run: RunDir, config: DictConfig) -> list[str]:
    """What decides the result and differs from the run's stored configuration."""
    from omegaconf import OmegaConf

    before: Any = OmegaConf.to_container(OmegaConf.load(run.config))
    after: Any = OmegaConf.to_container(config)
    return differences(before, after)


def _refuse_doubles(configs: Sequence[DictConfig]) -> None:
    names = [config.run.name for config in configs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        raise UserError(
            f"{names.count(name)} runs of this sweep have the same name",
            key="run.name",
            value=name,
            instead="leave run.name out, so that each is named after what it does, or sweep over run.name too",
        )


def _write(item: Prepared, plan: LaunchPlan) -> None:
    from omegaconf import OmegaConf

    item.run.path.mkdir(parents=True, exist_ok=True)
    partial = item.run.config.with_suffix(".partial")
    partial.write_text(OmegaConf.to_yaml(item.config), encoding="utf-8")
    os.replace(partial, item.run.config)
    plan.write(item.run)


def _executor(item: Prepared, plan: LaunchPlan, site: Site | None) -> Any:
    # submitit takes a moment to import, and a dry run needs none of it.
    if plan.kind == "slurm":
        from dthpc.launch.slurm_executor import SlurmExecutor

        return SlurmExecutor(site)
    from dthpc.launch.local_executor import LocalExecutor

    return LocalExecutor(item.run.submissions)


def _record(item: Prepared, plan: LaunchPlan, job_id: str) -> None:
    log = EventLog(item.run.events)
    log.write("run_submitted", job_id=job_id, launcher=plan.kind, command=" ".join(sys.argv))
    log.close()


def _forget(runs: Sequence[RunDir]) -> None:
    for run in runs:
        # A run that has come to life, whatever failed afterwards, keeps its records.
        if not run.attempts.exists() and not run.events.exists():
            shutil.rmtree(run.path, ignore_errors=True)
