"""`python -m calibration`: find, prove, write and apply the depths. `python -m calibration plan`: what they save."""

from __future__ import annotations

import argparse
import asyncio
import resource
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from deployments.errors import SettingsError, WindveError

if TYPE_CHECKING:
    from calibration.generation.generation_result import GenerationOptions, GenerationResult
    from calibration.measure.journal import Journal
    from calibration.report.report_model import WrittenReport
    from calibration.result import CalibrationOptions, CalibrationResult
    from calibration.run import Calibration
    from calibration.service.application import Application
    from calibration.service.config_file import ConfigFile

_DEFAULT_OUT = Path("reports/calibration")
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 128  # on average, where the model takes so many
_OF_EMBEDDINGS = ("slo", "shape", "tokens", "quantile", "most", "stress_step", "fresh", "model")
_OF_GENERATION = ("prompt_tokens", "answer_tokens")
_STREAMS = 4096  # that may be read at once in the proof
_INTERRUPTED = 130  # as a shell says of a command that Ctrl-C ended


def main() -> int:
    """Exit status: 0 calibrated, 1 refused (one sentence says why, nothing is written), 130 interrupted."""
    arguments = parser().parse_args()
    console = Console(highlight=False)
    try:
        if arguments.command == "plan":
            from calibration.planning import plan

            return plan.run(arguments, console)
        return _calibrate(arguments, console)
    except WindveError as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(
            "calibration: interrupted; run the same command again: it goes on from the bursts that were measured",
            file=sys.stderr,
        )
        return _INTERRUPTED


def parser() -> argparse.ArgumentParser:
    from calibration.planning import plan

    made = argparse.ArgumentParser(
        prog="python -m calibration",
        description=(
            "Measure each pool of a running windve application with bursts of queries, fit latency = alpha*C +\n"
            "beta and the cost of a query by its length, fine-tune the queue depths with all pools at work, verify\n"
            "them, prove streams above the capacity, write all into the Serve config, apply it live.\n"
            "Of an application that generates: measure planned steps, fit what they take, prove both promises by\n"
            "streams, write and apply `step_time`. Leaves a report (HTML, pictures, JSON).\n"
            "Calibrate when it is quiet: while it runs, clients are told busy more often."
        ),
        epilog=(
            "examples:\n"
            "  make calibrate SLO=1\n"
            "  python -m calibration --slo 1 --config serve_app/config.yaml --apply\n"
            "  python -m calibration --config serve_app/generation.yaml --apply     # an application that generates\n"
            "  ray job submit --working-dir . -- python -m calibration --slo 1 --apply\n"
            "  python -m calibration --deploy serve.yaml --rayservice windve     # on a cluster that serves nothing yet"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for add in (_add_promise, _add_generation, _add_measuring, _add_result, _add_application):
        add(made)
    commands = made.add_subparsers(dest="command", metavar="plan")
    plan.add_arguments(commands.add_parser("plan", help="devices and money that a calibrated report saves"))
    return made


def _add_promise(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("embeddings: what is promised, and to what traffic").add_argument
    add("--slo", type=float, metavar="S", help="seconds in which an admitted query is answered (default: what runs)")
    add(
        "--shape",
        choices=("burst", "steady"),
        default="burst",
        help="traffic that the depths are for. burst: all at once, alpha*C + beta, as in the paper; steady: at any "
        "moment, a query may wait for a running batch: alpha*C + 2*beta, so depths are smaller (default: %(default)s)",
    )
    add("--tokens", type=int, default=75, help="length of a query; longer ones cost depth (default: %(default)s)")
    add(
        "--quantile",
        type=float,
        default=1.0,
        help="share of each burst that has to meet the SLO; 1 is the slowest query (default: %(default)s)",
    )


def _add_generation(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("generation: the requests by which the capacity is meant").add_argument
    add("--prompt-tokens", type=int, metavar="N", help="of a prompt, on average (default: 512, or 1/4 of the context)")
    add("--answer-tokens", type=int, metavar="N", help="of an answer, on average (default: 128, or 1/8 of the context)")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how it is measured").add_argument
    add(
        "--most",
        type=int,
        default=2048,
        help="embeddings: never more queries at once for one replica (default: %(default)s)",
    )
    add(
        "--stress-step",
        type=int,
        default=0,
        metavar="N",
        help="embeddings: also run a stress test by steps of N, for comparison",
    )
    add("--seed", type=int, default=0, help="of the texts that are sent (default: %(default)s)")
    add("--estimate-only", action="store_true", help="stop after the fit: no fine-tuning, no proof, nothing written")
    add("--fresh", action="store_true", help="embeddings: forget what an interrupted run has measured")


def _add_result(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is done with the result").add_argument
    add("--config", type=Path, help="Serve config or RayService manifest to write the result into; none: not written")
    add("--apply", action="store_true", help="update the running application in place, without a restart")
    add("--dry-run", action="store_true", help="measure and show the change of the config as a diff; write nothing")
    add("--out", type=Path, default=_DEFAULT_OUT, help="folder of the report (default: %(default)s)")


def _add_application(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("which application").add_argument
    add("--application", metavar="NAME", help="which application, if several run")
    add("--model", metavar="NAME", help="embeddings: which of its models, if it serves several")
    add("--url", help="where it answers, if not where its config says")
    add(
        "--api-keys",
        metavar="WHERE",
        help="where the key is that the application wants, if not where its config says: file:PATH or env:NAME",
    )
    add(
        "--dashboard",
        metavar="URL",
        help="Ray's dashboard (default: this Ray job's, what `make serve` started, or http://127.0.0.1:8265); a token "
        "comes from RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH",
    )
    add(
        "--deploy",
        type=Path,
        metavar="CONFIG",
        help="first deploy this Serve config on the cluster, which serves nothing yet, with a replica for each device",
    )
    add(
        "--rayservice",
        metavar="NAME",
        help="with --deploy: end with the kubectl command that gives this RayService the config with the depths",
    )


def _calibrate(arguments: argparse.Namespace, console: Console) -> int:
    _check(arguments)
    application = _find(arguments, console)
    check_options(arguments, generates=application.generates)
    return (_calibrate_generation if application.generates else _calibrate_embeddings)(arguments, application, console)


def _calibrate_embeddings(arguments: argparse.Namespace, application: Application, console: Console) -> int:
    from calibration.measure.journal import Journal
    from calibration.progress import Progress
    from calibration.run import Calibration

    config = _read_config(arguments, application)
    options = _options(arguments, application.router_config().get("slo_s"))
    run = Calibration(application, options, Progress(console))
    if config is not None:
        config.check_describes(application)
    _allow_connections(3 * arguments.most * run.result.most_replicas)
    console.print(
        f"calibrating {application.model or application.name} at {application.address} for an SLO of "
        f"{options.slo_s:g} s, {options.shape} traffic, {options.tokens} tokens a query"
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
    run = GenerationCalibration(
        application, _generation_options(arguments, info["max_input_length"]), Progress(console)
    )
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


def _check(arguments: argparse.Namespace) -> None:
    """Raises SettingsError that names the option."""
    if arguments.slo is not None and not 0 < arguments.slo < 3600:
        raise SettingsError("--slo", f"should be seconds above 0, not {arguments.slo:g}")
    if not 0.99 <= arguments.quantile <= 1:
        raise SettingsError("--quantile", f"should be 0.99 to 1, not {arguments.quantile:g}: less is not proven")
    if arguments.estimate_only and (arguments.config or arguments.apply):
        raise SettingsError(
            "--estimate-only", "an estimate is not proven, so not written: leave --config and --apply out"
        )
    if arguments.rayservice is not None and (arguments.deploy is None or arguments.estimate_only):
        raise SettingsError("--rayservice", "needs --deploy, whose config it gets, and depths that are proven")
    for option, least in (("tokens", 3), ("most", 1), ("stress_step", 0)):
        if getattr(arguments, option) < least:
            raise SettingsError(f"--{option.replace('_', '-')}", f"should be at least {least}")


def check_options(arguments: argparse.Namespace, *, generates: bool) -> None:
    """Raises SettingsError that names an option that is for applications of the other kind."""
    others, kind = (_OF_EMBEDDINGS, "embeddings") if generates else (_OF_GENERATION, "generation")
    defaults = parser()
    given = [name for name in others if getattr(arguments, name) != defaults.get_default(name)]
    if given:
        this = "generates" if generates else "embeds"
        raise SettingsError(
            f"--{given[0].replace('_', '-')}", f"is for {kind}, and this application {this}: leave it out"
        )


def _generation_options(arguments: argparse.Namespace, context: int) -> GenerationOptions:
    from calibration.generation.generation_result import GenerationOptions

    prompt, answer = arguments.prompt_tokens, arguments.answer_tokens
    for option, tokens in (("--prompt-tokens", prompt), ("--answer-tokens", answer)):
        if tokens is not None and not 1 <= tokens < context:
            raise SettingsError(
                option, f"should be at least 1 and below the model's context of {context}, not {tokens}"
            )
    prompt = prompt or max(1, min(_PROMPT_TOKENS, context // 4))
    return GenerationOptions(prompt, answer or max(1, min(_ANSWER_TOKENS, context // 8)), arguments.seed)


def _options(arguments: argparse.Namespace, configured_slo_s: float | None) -> CalibrationOptions:
    from calibration.result import CalibrationOptions

    slo_s = arguments.slo or configured_slo_s
    if not slo_s:
        raise SettingsError("--slo", "missing: the running application has none either")
    return CalibrationOptions(
        slo_s=float(slo_s),
        shape=arguments.shape,
        tokens=arguments.tokens,
        quantile=arguments.quantile,
        most=arguments.most,
        seed=arguments.seed,
        stress_step=arguments.stress_step,
    )


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


if __name__ == "__main__":
    sys.exit(main())
