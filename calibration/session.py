"""`windve calibrate` at work: find the application, find and prove its depths or step times, write, apply, report."""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
from collections.abc import Coroutine
from typing import Any

from rich.console import Console

from calibration.command import check_options, generation_options, options
from calibration.generation import step_report
from calibration.generation.generation_result import GenerationResult
from calibration.generation.generation_run import GenerationCalibration
from calibration.measure.journal import Journal
from calibration.progress import Progress
from calibration.report import report as embeddings_report
from calibration.report.report_model import WrittenReport
from calibration.result import CalibrationResult
from calibration.run import Calibration
from calibration.service.application import Application, CalibrationFailed, find_dashboard
from calibration.service.config_file import ConfigFile, read_text, unified_diff, write_atomically
from calibration.service.deployment import deploy, patch_command
from deployments.errors import WindveError

_STREAMS = 4096  # that may be read at once in the proof


def calibrate(arguments: argparse.Namespace) -> None:
    """Raises WindveError where it is refused, KeyboardInterrupt or CancelledError where it is stopped."""
    console = Console(highlight=False)
    application = _find(arguments, console)
    check_options(arguments, generates=application.generates)
    config = ConfigFile.read(arguments.config, application) if arguments.config else None
    (_calibrate_generation if application.generates else _calibrate_embeddings)(arguments, application, config, console)


def _calibrate_embeddings(
    arguments: argparse.Namespace, application: Application, config: ConfigFile | None, console: Console
) -> None:
    wanted = options(arguments, application.router_config().get("slo_s"))
    run = Calibration(application, wanted, Progress(console))
    _allow_connections(3 * arguments.most * run.result.most_replicas)
    console.print(
        f"calibrating {application.model or application.name} at {application.address} for an SLO of "
        f"{wanted.slo_s:g} s, {wanted.shape} traffic, {wanted.tokens} tokens a query"
    )
    journal = Journal(arguments.out, run.about, fresh=arguments.fresh)
    if journal.resumed:
        console.print(f"going on from {journal.resumed} bursts of an interrupted run (--fresh starts over)")
    try:
        _measure(run.measure(journal, estimate_only=arguments.estimate_only), run.result, arguments, console)
    except CalibrationFailed:
        journal.finish()
        raise
    except BaseException:
        journal.close()
        raise
    try:
        _put(run.result, config, arguments, console)
    except WindveError:
        journal.close()  # not lost: the same command goes on from what was measured
        raise
    journal.finish()


def _calibrate_generation(
    arguments: argparse.Namespace, application: Application, config: ConfigFile | None, console: Console
) -> None:
    wanted = generation_options(arguments, application.info()["max_input_length"])
    run = GenerationCalibration(application, wanted, Progress(console))
    _allow_connections(_STREAMS)
    policy = run.result.policy
    console.print(
        f"calibrating {application.name} at {application.address}, which generates: {policy.ttft_s:g} s to the first "
        f"token, {policy.tpot_s:g} s a token"
    )
    _measure(run.measure(estimate_only=arguments.estimate_only), run.result, arguments, console)
    _put(run.result, config, arguments, console)


def _measure(
    work: Coroutine[Any, Any, None],
    result: CalibrationResult | GenerationResult,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Until it ends, fails or is stopped. Raises CalibrationFailed, with what was found until then in the report."""
    try:
        _run_until_signal(work)
    except CalibrationFailed as error:
        _show(result, str(error), WrittenReport(), arguments, console)
        raise


def _put(
    result: CalibrationResult | GenerationResult,
    config: ConfigFile | None,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Write and apply what was proven, as the options say, and leave the report. Raises WindveError."""
    written, application = WrittenReport(), result.application
    changes = {} if arguments.estimate_only else result.changes()
    try:
        if arguments.apply:
            application.check_unchanged()
        if config is not None:
            _write(config, application.placed(changes), console, None if arguments.dry_run else written)
        if arguments.apply and not arguments.dry_run:
            _apply(application, changes, written, console)
    except WindveError as error:
        _show(result, str(error), written, arguments, console)
        raise
    _show(result, None, written, arguments, console)
    if arguments.rayservice is not None:
        deployed = ConfigFile(arguments.deploy, read_text(arguments.deploy), application.name)
        print(patch_command(arguments.rayservice, deployed.edited(application.placed(changes))))


def _apply(application: Application, changes: dict[str, Any], written: WrittenReport, console: Console) -> None:
    """Last: a run that is killed before leaves a good file, and the old settings live."""
    application.apply(changes)
    written.applied = True
    console.print(f"applied: /info shows the new {'step times' if application.generates else 'depths'}")


def _find(arguments: argparse.Namespace, console: Console) -> Application:
    """The running application, deployed first where `--deploy` says so."""
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


def _write(config: ConfigFile, changes: dict[str, Any], console: Console, written: WrittenReport | None) -> None:
    """Show the change as a diff; write it unless `written`, which then says where, is None."""
    edited = config.edited(changes)
    console.print(unified_diff(config.text, edited, str(config.path)), markup=False, soft_wrap=True)
    if written is not None:
        written.backup = str(write_atomically(config.path, config.text, edited))
        written.config = str(config.path)
        console.print(f"written: {config.path} (before: {written.backup})", soft_wrap=True)


def _show(
    result: CalibrationResult | GenerationResult,
    problem: str | None,
    written: WrittenReport,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Leave the report. `problem` says why it was refused."""
    shown: Any = step_report if result.application.generates else embeddings_report
    report = result.report(problem, written)
    page = shown.write(arguments.out, report)
    shown.show(console, report)
    console.print(f"report: {page}", soft_wrap=True)


def _allow_connections(wanted: int) -> None:
    """A connection is an open file, and the usual limit is 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + 256, hard), hard))


def _run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until SIGINT or SIGTERM: then what has to be put back is put back."""

    async def run() -> None:
        task = asyncio.ensure_future(work)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await task

    asyncio.run(run())
