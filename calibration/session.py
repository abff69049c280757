"""Runs `windve calibrate`: finds the application, calibrates it, and writes, applies and reports the result."""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import resource
import shlex
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from calibration.generation import step_report
from calibration.generation.generation_result import GenerationOptions, GenerationResult
from calibration.generation.generation_run import GenerationCalibration
from calibration.progress import Progress
from calibration.report import report as embeddings_report
from calibration.report.page import written_into
from calibration.report.report_model import CalibrationOptions, WrittenReport
from calibration.result import CalibrationResult
from calibration.run import Calibration
from calibration.service.application import Application, CalibrationFailed, find_dashboard
from calibration.service.config_file import ConfigFile, example, unified_diff, write_atomically
from calibration.service.deployment import deploy
from calibration.service.ray_service import RayService
from deployments.errors import SettingsError, WindveError
from serve_app.config.models import Args

_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 128  # default means, if the model's context is long enough
_OF_EMBEDDINGS = ("slo", "shape", "tokens", "most", "stress_step", "model")
_OF_GENERATION = ("prompt_tokens", "answer_tokens")
_STREAMS = 4096  # most streams read at once in the proof

Result = CalibrationResult | GenerationResult


def calibrate(arguments: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """`arguments`: those of `windve calibrate`, with the `defaults` of those that are not given. Raises
    WindveError if the calibration fails, KeyboardInterrupt or CancelledError if it is stopped.
    """
    console = Console(highlight=False, markup=False)  # names and paths may have brackets
    service = RayService.beside_this_pod(arguments.rayservice) if arguments.rayservice is not None else None
    application = _find(arguments, console)
    _check_kind(arguments, defaults, generates=application.generates)
    config = ConfigFile.read(arguments.config, application) if arguments.config else None
    if service is not None:  # refused before anything is measured
        service.change(application, example(application), dry_run=True)
    session = _Session(arguments, application, config, service, console)
    with alone_in(arguments.out):
        run = session.of_generation() if application.generates else session.of_embeddings()
        written = WrittenReport()
        try:
            _run_until_signal(run.measure(estimate_only=arguments.estimate_only))
            if not arguments.estimate_only:
                session.put(run.result.changes(), written)
        except WindveError as error:
            session.show(run.result, written, str(error))
            raise
        session.show(run.result, written)


def _check_kind(arguments: argparse.Namespace, defaults: argparse.Namespace, *, generates: bool) -> None:
    """Raises SettingsError that names an option for the other kind of application."""
    others, kind = (_OF_EMBEDDINGS, "embeddings") if generates else (_OF_GENERATION, "generation")
    given = [name for name in others if getattr(arguments, name) != getattr(defaults, name)]
    if given:
        this = "generates" if generates else "embeds"
        raise SettingsError(
            f"--{given[0].replace('_', '-')}", f"is for {kind}, but this application {this}: leave it out"
        )


def _generation_options(arguments: argparse.Namespace, context: int) -> GenerationOptions:
    """Raises SettingsError that names the option."""
    prompt, answer = arguments.prompt_tokens, arguments.answer_tokens
    for option, tokens in (("--prompt-tokens", prompt), ("--answer-tokens", answer)):
        if tokens is not None and not 1 <= tokens < context:
            raise SettingsError(option, f"should be from 1 to below the model's context of {context}, not {tokens}")
    return GenerationOptions(
        prompt_tokens=prompt or max(1, min(_PROMPT_TOKENS, context // 4)),
        answer_tokens=answer or max(1, min(_ANSWER_TOKENS, context // 8)),
        seed=arguments.seed,
    )


def _options(arguments: argparse.Namespace, configured_slo_s: float | None) -> CalibrationOptions:
    """Raises SettingsError that names the option."""
    slo_s = arguments.slo or configured_slo_s
    if not slo_s:
        raise SettingsError("--slo", "missing; set it, because the running application has none")
    given = {name: getattr(arguments, name) for name in ("shape", "tokens", "most", "seed", "stress_step")}
    return CalibrationOptions(slo_s=float(slo_s), **given)


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock `--out`, so that two runs do not write into it. Raises SettingsError before anything is measured."""
    with written_into(folder):
        place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise SettingsError(
            "--out", f"another calibration writes into {folder}: wait until it has ended, or name another folder"
        ) from None
    except OSError:
        pass  # a file system without locks
    try:
        yield
    finally:
        os.close(place)


def _find(arguments: argparse.Namespace, console: Console) -> Application:
    """The running application, deployed first if `--deploy` is given."""
    dashboard = find_dashboard(arguments.dashboard)
    if arguments.deploy is not None:
        console.print(f"deploying {arguments.deploy} at {dashboard}: loading the model, warming up", soft_wrap=True)
        deploy(arguments.deploy, dashboard)
    application = Application.find(
        dashboard=dashboard,
        name=arguments.application,
        url=arguments.url,
        api_keys=arguments.api_keys,
        model=arguments.model,
    )
    if arguments.deploy is not None:
        application.wait_until_it_answers()
    return application


@dataclass(frozen=True, slots=True)
class _Session:
    """One run of the command. `config`: the file to write; `service`: the RayService to write."""

    arguments: argparse.Namespace
    application: Application
    config: ConfigFile | None
    service: RayService | None
    console: Console

    def of_embeddings(self) -> Calibration:
        arguments, application = self.arguments, self.application
        wanted = _options(arguments, application.router_config().get("slo_s"))
        run = Calibration(application, wanted, Progress(self.console))
        models = Args(application.deployed.get("args")).models
        models[application.model or next(iter(models))].check_slo(wanted.slo_s, "--slo")
        replicas = sum(pool["live_replicas"] for pool in run.result.pools.values())
        _allow_connections(3 * arguments.most * replicas)
        self.console.print(
            f"calibrating {application.model or application.name} at {application.address} for an SLO of "
            f"{wanted.slo_s:g} s, {wanted.shape} traffic, {wanted.tokens} tokens a query"
        )
        return run

    def of_generation(self) -> GenerationCalibration:
        application = self.application
        wanted = _generation_options(self.arguments, application.info()["max_input_length"])
        run = GenerationCalibration(application, wanted, Progress(self.console))
        _allow_connections(_STREAMS)
        policy = run.result.policy
        self.console.print(
            f"calibrating {application.name} at {application.address}, which generates: {policy.ttft_s:g} s to the "
            f"first token, {policy.tpot_s:g} s a token"
        )
        return run

    def put(self, changes: dict[str, Any], written: WrittenReport) -> None:
        """Write and apply the proven result, as the options say. Raises WindveError."""
        if self.arguments.apply:
            self.application.check_unchanged()
        if self.config is not None:
            self._write(self.config, changes, written)
        if self.service is not None:
            self._write_service(self.service, changes, written)
        if self.arguments.apply and not self.arguments.dry_run:  # last: a killed run still leaves a valid file
            self.application.apply(changes)
            written.applied = True
            self.console.print(
                f"applied: /info shows the new {'step times' if self.application.generates else 'depths'}"
            )

    def _write(self, config: ConfigFile, changes: dict[str, Any], written: WrittenReport) -> None:
        """Show the change as a diff, and write it unless only the diff is asked for."""
        edited = config.edited(changes)
        self.console.print(unified_diff(config.text, edited, str(config.path)), markup=False, soft_wrap=True)
        if not self.arguments.dry_run:
            written.backup = str(write_atomically(config.path, config.text, edited))
            written.config = str(config.path)
            self.console.print(f"written: {config.path} (before: {written.backup})", soft_wrap=True)

    def _write_service(self, service: RayService, changes: dict[str, Any], written: WrittenReport) -> None:
        """Write the RayService unless only the diff is asked for. Prints the patch where it cannot be written."""
        try:
            after = service.change(self.application, changes, dry_run=self.arguments.dry_run)
        except CalibrationFailed:
            patch = json.dumps({"spec": {"serveConfigV2": service.edited(self.application, changes)}})
            print(f"kubectl patch rayservice {service.name} --type merge -p {shlex.quote(patch)}")
            raise
        self.console.print(unified_diff(service.text, after, f"rayservice/{service.name}"), soft_wrap=True)
        if not self.arguments.dry_run:
            written.config = f"rayservice/{service.name}"
            self.console.print(f"written: {written.config}; KubeRay applies it in place", soft_wrap=True)

    def show(self, result: Result, written: WrittenReport, problem: str | None = None) -> None:
        """Write and show the report. `problem`: why the calibration failed."""
        shown = (
            step_report.shown(result.report(problem, written))
            if isinstance(result, GenerationResult)
            else embeddings_report.shown(result.report(problem, written))
        )
        page = shown.write(self.arguments.out)
        shown.show(self.console)
        self.console.print(f"report: {page}", soft_wrap=True)


def _allow_connections(wanted: int) -> None:
    """Raise the limit of open files, usually 1,024, because each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + 256, hard), hard))


def _run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until SIGINT or SIGTERM. In both cases, cleanup runs."""

    async def run() -> None:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await task

    asyncio.run(run())
