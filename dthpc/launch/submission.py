"""From composed configurations to started runs: all is checked first, then written, then started, or nothing is."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from dthpc.attempt.plan import LaunchPlan
from dthpc.config.identity import default_name, differences, result_values
from dthpc.errors import UserError, raise_together
from dthpc.launch.checks import find_mistakes
from dthpc.launch.hints import hints
from dthpc.launch.mpi import wants_mpi
from dthpc.launch.planning import make_plan
from dthpc.launch.preflight import judge_launch
from dthpc.launch.request import read_request
from dthpc.launch.site import Site, probe
from dthpc.launch.verdicts import Verdict
from dthpc.monitor.events import EventLog
from dthpc.rundir import RunDir
from dthpc.slurm.client import SlurmClient

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dthpc.config.compose import Choices
    from dthpc.watch.report import RunReport


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

    seen: int
    """Bytes of its events when it was looked at: more of them later mean that another command has started it."""

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
    mpi = any(wants_mpi(config) for config in wanting)
    return probe(SlurmClient(), wanting[0].cluster.qos, mpi) if wanting else None


def prepare(found: Sequence[tuple[DictConfig, Choices]]) -> tuple[list[Prepared], Site | None]:
    """Check configurations and plan their runs; nothing is written.

    Args:
        found: configurations with what they were composed of.

    Returns:
        The runs, whose `errors` tell what the machine or the site would refuse; and the site.

    Raises:
        UserError: all mistakes in the configurations, together; the site does not answer; a name is taken.
    """
    resolved = [_resolve(config, choices.options) for config, choices in found]
    # Mistakes of the configuration come first: with them, what the site says would only confuse.
    refuse([error for config in resolved for error in find_mistakes(config)])
    _refuse_doubles(resolved)
    site = ask_site(resolved)
    return [_plan(config, site, choices.typed) for config, (_, choices) in zip(resolved, found, strict=True)], site


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
    claims: list[_Claim] = []
    try:
        for item, plan in planned:
            claims.append(_Claim.make(item))
            _write(item, plan)
        jobs = _executor(*planned[0], site).launch([(item.run, plan) for item, plan in planned])
    except BaseException as error:
        for claim in claims:
            claim.undo()
        if isinstance(error, OSError):
            raise _unwritable(error, prepared[0].run) from error
        raise
    for (item, plan), job, claim in zip(planned, jobs, claims, strict=True):
        _record(item, plan, str(job.job_id))
        claim.guard.close()
    return list(jobs)


@dataclass(frozen=True)
class _Claim:
    """A run's folder taken for a start, and what it was before, to put that back if nothing starts."""

    run: RunDir
    guard: BinaryIO
    """Its lock keeps other commands from starting the same run at the same moment."""

    made: Path | None
    """The outermost folder that was made; `None` where the run's folder existed."""

    files: dict[Path, bytes]
    """What a start overwrites."""

    @classmethod
    def make(cls, item: Prepared) -> _Claim:
        """Take the folder.

        Raises:
            OSError: it can't be made.
            UserError: another command has started the run since it was looked at.
        """
        run = item.run
        files = {path: path.read_bytes() for path in (run.config, run.launch) if path.is_file()}
        absent = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
        run.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            run.path.mkdir(exist_ok=not absent)
            guard = open(run.path / ".start.guard", "ab")  # noqa: SIM115, it is closed when the start is over
            fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _size(run.events) > item.seen:
                raise FileExistsError
        except (FileExistsError, BlockingIOError):
            raise UserError(
                "another command has started this run just now",
                key="run.name",
                value=run.name,
                instead=f"follow it with `python -m dthpc.status {run.path} --watch`, or choose another run.name",
            ) from None
        except OSError:
            if absent:
                with contextlib.suppress(OSError):
                    run.path.rmdir()
            raise
        return cls(run, guard, absent[-1] if absent else None, files)

    def undo(self) -> None:
        """Leave the folder as it was; one that has come to life meanwhile stays, whatever failed afterwards."""
        self.guard.close()
        with contextlib.suppress(OSError):
            if self.made is None:
                self._put_back()
            elif not self.run.attempts.exists() and not self.run.events.exists():
                self._remove(self.made)

    def _put_back(self) -> None:
        _draft(self.run).unlink(missing_ok=True)
        for path in (self.run.config, self.run.launch):
            if path not in self.files:
                path.unlink(missing_ok=True)
            elif path.read_bytes() != self.files[path]:
                path.write_bytes(self.files[path])

    def _remove(self, outermost: Path) -> None:
        shutil.rmtree(self.run.path, ignore_errors=True)
        # Folders above it go too, unless something else has come to lie there.
        folder = self.run.path
        while folder != outermost:
            folder = folder.parent
            folder.rmdir()


def _unwritable(error: OSError, run: RunDir) -> UserError:
    return UserError(
        f"can't be written: {error.strerror}",
        key="run.root",
        value=error.filename or run.path.parent,
        instead="run.root=FOLDER, a folder with room that you may write",
    )


def _resolve(config: DictConfig, options: Mapping[str, str]) -> DictConfig:
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
    config.run.root = _absolute(config.run.root)
    source = config.data.get("source") if hasattr(config.data, "get") else None
    if source is not None and hasattr(source, "get") and isinstance(source.get("path"), str) and source.path:
        # The same command must mean the same text wherever the run goes on.
        source.path = _absolute(source.path)
    reference = config.job.get("reference") if hasattr(config.job, "get") else None
    if isinstance(reference, str):
        config.job.reference = _absolute(reference)
    if config.run.name is None:
        plain = OmegaConf.to_container(config, throw_on_missing=False)
        assert isinstance(plain, dict)
        config.run.name = default_name({str(key): value for key, value in plain.items()}, options)
    return config


def _absolute(path: str) -> str:
    # A home that nobody has stays as it is written, for the checks to tell.
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH111


def _plan(config: DictConfig, site: Site | None, typed: frozenset[str]) -> Prepared:
    run = RunDir(Path(config.run.root) / config.run.name)
    seen = _size(run.events)
    earlier, changed = _earlier(run, config)
    verdicts = judge_launch(config, site)
    refused = any(verdict.status == "error" for verdict in verdicts)
    verdicts += [] if refused else hints(config, read_request(config), typed)
    return Prepared(run, config, None if refused else make_plan(config, run, site), verdicts, earlier, changed, seen)


def _earlier(run: RunDir, config: DictConfig) -> tuple[RunReport | None, bool]:
    """What is known of a run that exists, and whether this configuration asks for another result than before.

    Raises:
        UserError: the folder is no run's, the change was not accepted, or the run has not ended.
    """
    if not run.path.exists():
        return None, False
    # Only here: most commands start a new run, and the login path is measured.
    from dthpc.watch.survey import is_run, quick_client, survey

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
    if not report.ended and not config.dry_run:
        job = f" as job {report.job_id}" if report.job_id and report.kind == "slurm" else ""
        raise UserError(
            f"this run is {report.state} already{job}",
            key="run.name",
            value=run.name,
            instead=f"follow it with `python -m dthpc.status {run.path} --watch`, or choose another run.name",
        )
    done = report.checkpoint.step if report.checkpoint is not None else 0
    if report.state == "finished" and report.summary is not None and done == 0:
        raise UserError(
            "this run is finished, but its checkpoints are gone",
            key="run.name",
            value=run.name,
            instead=f"another run.name to train again, or put them back into {run.checkpoints}",
        )
    if done > config.train.steps:
        raise UserError(
            f"the run has made {done} steps already",
            key="train.steps",
            value=config.train.steps,
            instead=f"train.steps={done} or more, or another run.name",
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
        one, other, *_ = (config for config in configs if config.run.name == name)
        key = _first_difference(one, other)
        raise UserError(
            f"{names.count(name)} runs of this sweep have the same name"
            + (", and what differs is no part of it" if key else ", and are the same"),
            key="run.name",
            value=name,
            instead=f"let it differ, as by 'run.name=NAME-${{{key}}}'" if key else "different values for each",
        )


def _first_difference(one: DictConfig, other: DictConfig) -> str | None:
    """A key that two configurations give different values; None where there is none."""
    from omegaconf import OmegaConf

    plain: list[Any] = [OmegaConf.to_container(config) for config in (one, other)]
    before, after = (result_values(each, tuple(each)) for each in plain)
    return next((key for key in before if before[key] != after.get(key)), None)


def _write(item: Prepared, plan: LaunchPlan) -> None:
    from omegaconf import OmegaConf

    draft = _draft(item.run)
    draft.write_text(OmegaConf.to_yaml(item.config), encoding="utf-8")
    os.replace(draft, item.run.config)
    plan.write(item.run)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _draft(run: RunDir) -> Path:
    return run.config.with_suffix(".partial")


def _executor(item: Prepared, plan: LaunchPlan, site: Site | None) -> Any:
    # submitit takes a moment to import, and a dry run needs none of it.
    if plan.kind == "slurm":
        from dthpc.launch.slurm_executor import SlurmExecutor

        return SlurmExecutor(site)
    from dthpc.launch.local_executor import LocalExecutor

    return LocalExecutor(item.run.submissions)


def _record(item: Prepared, plan: LaunchPlan, job_id: str) -> None:
    try:
        log = EventLog(item.run.events)
        log.write("run_submitted", job_id=job_id, launcher=plan.kind, command=" ".join(sys.argv))
        log.close()
    except OSError as error:
        # It runs, whatever the disk says: the user must hear of it.
        print(
            f"dthpc: job {job_id} is started, but {item.run.events} can't be written: {error.strerror}", file=sys.stderr
        )
