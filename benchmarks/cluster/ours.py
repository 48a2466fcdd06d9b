"""The search with prefect-tune on Dask's workers: a process of its own.

python -m benchmarks.cluster.ours WORK new|resume
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import prefect_tune as pt
from benchmarks.cluster.work import NAME, Outcome, Sleeping, Work, has_state


class Steps(Sleeping, pt.Trainable):
    """Imported by the trials' processes: nothing but what is measured is loaded here."""


def _main(work: Work, act: str) -> None:
    from prefect_dask.task_runners import DaskTaskRunner

    results = pt.tune.with_options(task_runner=DaskTaskRunner(address=work.address))(
        "benchmarks.cluster.ours:Steps",
        work.config(pt.uniform(0, 1)),
        target=work.target,
        experiment=NAME,
        metric="loss",
        num_samples=work.trials,
        scheduler=pt.ASHA(max_t=work.steps, variant="stopping"),
        checkpoint=pt.Cadence(every_steps=work.save_every),
        max_concurrent_trials=work.concurrent,
        resume="must" if act == "resume" else "never",
    )
    _outcome(results, work).write(work)


def _outcome(results: pt.Results, work: Work) -> Outcome:
    trials = results.trials.values()
    complete = [trial for trial in trials if trial.step == work.steps and trial.id not in results.errors]
    all_steps = list(range(1, work.steps + 1))
    reported = [trial for trial in trials if [report.step for report in results.curve(trial)] == all_steps]
    readable = [is_good for trial in trials for is_good in _readable(results, trial.id)]
    return Outcome(len(complete), len(reported), len(readable), readable.count(False))


def _readable(results: pt.Results, trial: str) -> Iterator[bool]:
    """Yield whether each checkpoint of a trial, with every byte verified, holds the state of its step."""
    from prefect_tune.core.storage.layout import TrialKey

    key = TrialKey(experiment=NAME, generation=1, trial=trial)
    for ref in results.trials[trial].checkpoints:
        with results.target.checkpoint(key.checkpoint_key(ref)).as_directory() as folder:
            yield has_state(str(folder), ref.step)


if __name__ == "__main__":
    _main(Work(**json.loads(sys.argv[1])), sys.argv[2])
