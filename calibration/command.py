"""`windve calibrate`: find, prove, write and apply the depths."""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from calibration.options import check, check_options, generation_options, options, parser
from deployments.errors import WindveError

if TYPE_CHECKING:
    from calibration.generation.generation_result import GenerationResult
    from calibration.measure.journal import Journal
    from calibration.report.report_model import WrittenReport
    from calibration.result import CalibrationResult
    from calibration.run import Calibration
    from calibration.service.application import Application
    from calibration.service.config_file import ConfigFile

_STREAMS = 4096  # that may be read at once in the proof
_INTERRUPTED = 130  # as a shell says of a command that Ctrl-C ended


def main(words: Sequence[str]) -> int:
    """Exit status: 0 calibrated, 130 interrupted. Raises WindveError where it is refused; then nothing is written."""
    arguments = parser().parse_args(words)
    console = Console(highlight=False)
    try:
        return _calibrate(arguments, console)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(
            "windve: interrupted; run the same command again: it goes on from the bursts that were measured",
            file=sys.stderr,
        )
        return _INTERRUPTED


def _calibrate(arguments: argparse.Namespace, console: Console) -> int:
    check(arguments)
    application = _find(arguments, console)
    check_options(arguments, generates=application.generates)
    return (_calibrate_generation if application.generates else _calibrate_embeddings)(arguments, application, console)


def _calibrate_embeddings(arguments: argparse.Namespace, application: Application, console: Console) -> int:
    from calibration.measure.journal import Journal
    from calibration.progress import Progress
    from calibration.run import Calibration

    config = _read_config(arguments, application)
    wanted = options(arguments, application.router_config().get("slo_s"))
    run = Calibration(application, wanted, Progress(console))
    if config is not None:
        config.check_describes(application)
    _allow_connections(3 * arguments.most * run.result.most_replicas)
    console.print(
        f"calibrating {application.model or application.name} at {application.address} for an SLO of "
        f"{wanted.slo_s:g} s, {wanted.shape} traffic, {wanted.tokens} tokens a query"
    )
    journal = Journal(arguments.out, run.about, fresh=arguments.fresh)
    if journal.resumed:
        console.print(f"going on from {journal.resumed} bursts of an interrupted run (--fresh starts over)")
    _measure(run, journal, arguments, console)
    try:
        _put(run.result, config, arguments, console)
    except WindveError:
        journal.close()  # not lost: the same command goes on from what was measured
        raise
    journal.finish()
    return 0


def _calibrate_generation(arguments: argparse.Namespace, application: Application, console: Console) -> int:
    from calibration.generation.generation_run import GenerationCalibration
    from calibration.progress import Progress
    from calibration.report.report_model import WrittenReport
    from calibration.service.application import CalibrationFailed

    config = _read_config(arguments, application)
    if config is not None:
        config.check_describes(application)
    info = application.info()
    run = GenerationCalibration(application, generation_options(arguments, info["max_input_length"]), Progress(console))
    _allow_connections(_STREAMS)
    policy = run.result.policy
    console.print(
        f"calibrating {application.name} at {application.address}, which generates: {policy.ttft_s:g} s to the first "
        f"token, {policy.tpot_s:g} s a token"
    )
    try:
        _run_until_signal(run.measure(estimate_only=arguments.estimate_only))
    except CalibrationFailed as error:
        _show(run.result, str(error), WrittenReport(), arguments.out, console)
        raise
    _put(run.result, config, arguments, console)
    return 0


def _read_config(arguments: argparse.Namespace, application: Application) -> ConfigFile | None:
    from calibration.service.config_file import ConfigFile

    return ConfigFile.read(arguments.config, application) if arguments.config else None


def _put(
    result: CalibrationResult | GenerationResult,
    config: ConfigFile | None,
    arguments: argparse.Namespace,
    console: Console,
) -> None:
    """Write and apply what was proven, as the options say, and leave the report. Raises WindveError."""
    from calibration.report.report_model import WrittenReport

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
        _show(result, str(error), written, arguments.out, console)
        raise
    _show(result, None, written, arguments.out, console)
    if arguments.rayservice is not None:
        _show_patch(arguments, application, application.placed(changes))


def _apply(application: Application, changes: dict[str, Any], written: WrittenReport, console: Console) -> None:
    """Last: a run that is killed before leaves a good file, and the old settings live."""
    application.apply(changes)
    written.applied = True
    console.print(f"applied: /info shows the new {'step times' if application.generates else 'depths'}")


def _measure(run: Calibration, journal: Journal, arguments: argparse.Namespace, console: Console) -> None:
    """Until it ends, fails or is stopped. What a run that is stopped has measured stays in the journal."""
    from calibration.report.report_model import WrittenReport
    from calibration.service.application import CalibrationFailed

    try:
        _run_until_signal(run.measure(journal, estimate_only=arguments.estimate_only))
    except CalibrationFailed as error:
        _show(run.result, str(error), WrittenReport(), arguments.out, console)
        journal.finish()
        raise
    except BaseException:
        journal.close()
        raise


def _find(arguments: argparse.Namespace, console: Console) -> Application:
    """The running application, deployed first where `--deploy` says so."""
    # Before anything imports ray: finding a local service sets Ray's token, which ray reads when it is imported.
    from calibration.service.application import Application, find_dashboard

    dashboard = find_dashboard(arguments.dashboard)
    if arguments.deploy is not None:
        from calibration.service.deployment import deploy

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


def _show_patch(arguments: argparse.Namespace, application: Application, changes: dict[str, Any]) -> None:
    from calibration.service.config_file import ConfigFile, read_text
    from calibration.service.deployment import patch_command

    deployed = ConfigFile(arguments.deploy, read_text(arguments.deploy), application.name)
    print(patch_command(arguments.rayservice, deployed.edited(changes)))


def _write(config: ConfigFile, changes: dict[str, Any], console: Console, written: WrittenReport | None) -> None:
    """Show the change as a diff; write it unless `written`, which then says where, is None."""
    from calibration.service.config_file import unified_diff, write_atomically

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
    folder: Path,
    console: Console,
) -> None:
    """`problem` says why it was refused."""
    if result.application.generates:
        from calibration.generation.step_report import show, write
    else:
        from calibration.report.report import show, write  # type: ignore[assignment]
    report: Any = result.report(problem, written)
    page = write(folder, report)
    show(console, report)
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
