"""The commands of the panel *Search*: `run`, `resume`, `stop` and `deploy`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prefect_tune.cli.app import AsJson, ExperimentName, Target, TrialName, asks, command
from prefect_tune.cli.open_target import existing_place
from prefect_tune.cli.search_options import (
    RESUME,
    RUN,
    object_from,
    parameters_from,
    resume_command,
    search_in_this_process,
    space_from,
    takes,
    values_from,
)
from prefect_tune.core.errors import InvalidInput, TuneError
from prefect_tune.core.shown_text import visible
from prefect_tune.deploy.deployment_specs import (
    Collision,
    DeploymentSchedule,
    Interval,
    named,
    of_one_experiment,
    wanted,
)

if TYPE_CHECKING:
    from prefect_tune.deploy.automations import Installed
    from prefect_tune.deploy.deployments import Deployed


@command
@takes(RUN)
def run(
    trainable: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The trainable: a function or a class.", show_default=False)
    ],
    target: Annotated[str, asks("--target", "TARGET", "Where it is stored.")],
    experiment: Annotated[str, asks("--experiment", "EXPERIMENT", "Its name there.")],
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Search a space for the best configuration of MODULE:NAME; resume EXPERIMENT if it exists.

    For example:

    prefect-tune run my_project.train:Net --target ./runs --experiment first
      --set "lr=loguniform(1e-4,1e-1)" --metric loss --num-samples 20
      --scheduler '{"ASHA": {"max_t": 100}}'
    """
    space = space_from(options.pop("space"), options.pop("set") or ())
    named = {"trainable": trainable, "target": target, "experiment": experiment}
    parameters = {"space": space, **named, **parameters_from(options)}
    search_in_this_process("tune", parameters, resume_command(target, experiment, trainable), as_json=as_json)


@command
@takes(RESUME)
def resume(
    target: Target,
    experiment: ExperimentName,
    fork: Annotated[str | None, asks("--fork", "NAME", "Resume a copy of EXPERIMENT under this name.")] = None,
    at: Annotated[int | None, asks("--at", "ENTRY", "Fork at this journal entry. Default: the last.")] = None,
    *,
    as_json: AsJson = False,
    **options: Any,
) -> None:
    """Resume the search EXPERIMENT with the settings in its journal; options given here replace them.

    It never starts a new experiment.
    A space given here replaces the whole earlier one.
    """
    space = space_from(options.pop("space"), options.pop("set") or ())
    asked = {"fork": fork, "at": at, "space": space or None}
    given = {name: value for name, value in asked.items() if value is not None}
    parameters = {"experiment": experiment, "target": target, **given, **parameters_from(options)}
    again = resume_command(target, fork or experiment, parameters.get("trainable"))
    search_in_this_process("resume", parameters, again, as_json=as_json)


@command
def stop(
    target: Target,
    experiment: ExperimentName,
    trial: TrialName = None,
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Reason, for the journal.", show_default=False)] = "",
    wait_seconds: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long to wait for the end; 0: do not wait.")
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """Stop a running search, after every trial has saved; with --trial, end one of its trials for good.

    The search checks TARGET for requests every few seconds. Exits with 1 if it has not answered.
    """
    from prefect_tune.tuner.stop_requests import stop as send_stop_request

    existing_place(target)
    outcome = send_stop_request(experiment, target=target, trial=trial, reason=reason, wait_seconds=wait_seconds)
    done = outcome.status in ("stopped", "had-ended", "stopping")
    if as_json:
        print(json.dumps({"status": outcome.status, "message": outcome.message}, indent=2))
    else:
        print(visible(outcome.message), file=sys.stdout if done else sys.stderr)
    if not done and wait_seconds:
        raise typer.Exit(1)


_Flows = Annotated[
    list[str] | None, typer.Argument(metavar="FLOW", help="Such as tune. Default: all.", show_default=False)
]
_Variables = Annotated[list[str] | None, asks("--job-variable", "NAME=VALUE", "Variable of the pool's job template.")]
_Params = Annotated[str, asks("--params", "JSON", "Parameters, as a JSON object.")]
_Param = Annotated[list[str] | None, asks("--param", "NAME=VALUE", "One parameter; VALUE is JSON or text.")]
_Crons = Annotated[list[str] | None, asks("--cron", "CRON", 'Schedule, such as "0 2 * * *".')]


@command
def deploy(
    flows: _Flows = None,
    work_pool: Annotated[str, asks("--work-pool", "POOL", "Work pool of the runs; required.")] = "",
    work_queue: Annotated[str | None, asks("--work-queue", "QUEUE", "Work queue of that pool.")] = None,
    image: Annotated[str | None, asks("--image", "IMAGE", "Container image with this package.")] = None,
    job_variables: _Variables = None,
    prefix: Annotated[str, asks("--prefix", "TEXT", "Prefix of each deployment's name, such as staging-.")] = "",
    name: Annotated[str | None, asks("--name", "NAME", "One FLOW, for the experiment NAME.")] = None,
    params: _Params = "{}",
    param: _Param = None,
    cron: _Crons = None,
    every_seconds: Annotated[float | None, asks("--every-seconds", "S", "Run it every S seconds.")] = None,
    time_zone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="Time zone of --cron, such as Europe/Berlin.")
    ] = "UTC",
    collision: Annotated[
        Collision, typer.Option(metavar="WHAT", help="If the last run is active: cancel-new, or enqueue.")
    ] = "cancel-new",
    automations: Annotated[
        bool,
        typer.Option("--automations/--no-automations", help="Restart crashed runs; with --notify, alerts too."),
    ] = True,
    notify: Annotated[str | None, asks("--notify", "BLOCK", "Block that sends alerts: slack-webhook/NAME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Create a deployment of each FLOW, by default of all flows; with --name, one for a single experiment.

    Run it again to update the deployments; schedules that were changed in the UI stay. The worker imports the
    trainable: install its project there, or name its folder in PYTHONPATH, as in the second example.

    prefect-tune deploy --work-pool training

    prefect-tune deploy --work-pool training --job-variable 'env={"PYTHONPATH": "/home/me/project"}'

    prefect-tune deploy tune --name nightly --params "$(cat nightly.json)"
      --work-pool training --cron "0 2 * * *" --timezone Europe/Berlin
    """
    from prefect_tune.deploy.automations import apply_automations, require_block
    from prefect_tune.deploy.deployments import Pool, deploy

    if not work_pool:
        raise InvalidInput("--work-pool: expected a work pool for the runs; `prefect work-pool ls` lists them")
    if notify is not None and not automations:
        raise InvalidInput(f"--notify {notify}: alerts are automations; leave out --no-automations")
    variables = {**(values_from(job_variables or (), "--job-variable") or {}), **({"image": image} if image else {})}
    asked = {**object_from(params, "--params"), **(values_from(param or (), "--param") or {})}
    schedules = [DeploymentSchedule(when, time_zone) for when in cron or ()]
    if every_seconds is not None:
        if not 0 < every_seconds <= timedelta.max.total_seconds():
            raise InvalidInput(f"--every-seconds: expected more than 0, and a finite time, found {every_seconds:g}")
        schedules.append(DeploymentSchedule(Interval(timedelta(seconds=every_seconds)), time_zone))
    if name is None and (asked or schedules):
        raise InvalidInput("--params, --param, --cron and --every-seconds need one FLOW and --name NAME")
    if name is not None and len(flows or ()) != 1:
        raise InvalidInput(f"--name {name}: expected one FLOW, as in: prefect-tune deploy tune --name {name}")
    offers = named(flows or ())
    if name is None:
        specs = wanted(offers, prefix)
    else:
        specs = [of_one_experiment(offers[0], f"{prefix}{name}", asked, schedules or None, collision)]
    if notify is not None:
        require_block(notify)
    done = deploy(specs, Pool(name=work_pool, queue=work_queue, job_variables=variables))
    try:
        installed = apply_automations(notify=notify, without_action="leave out") if automations else []
    except TuneError as error:
        _print_outcome(done, (), work_pool, as_json=as_json)
        raise TuneError(f"{error}; the deployments were applied; --no-automations skips the automations") from error
    _print_outcome(done, installed, work_pool, as_json=as_json)


def _print_outcome(done: Sequence[Deployed], installed: Sequence[Installed], pool: str, *, as_json: bool) -> None:
    if as_json:
        names = [each.name for each in installed]
        print(json.dumps({"deployments": [asdict(each) for each in done], "automations": names}, indent=2))
        return
    width = max(len(each.name) for each in done)
    for each in done:
        print(f"{each.outcome}  {each.name:{width}}  {each.link or ''}".rstrip())
        for schedule in each.schedules:
            print(f"         runs at {schedule}")
    for automation in installed:
        print(f"automation  {'on ' if automation.enabled else 'off'}  {automation.name}")
    if installed and not any(each.is_alert and each.acts for each in installed):
        print("alerts are not installed; to install them: --notify slack-webhook/NAME")
    print(f"work pool {pool!r}: runs start when a worker serves it: prefect worker start --pool {pool}")
