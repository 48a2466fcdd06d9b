"""Results of an experiment: its best trials, learning curves, errors and checkpoints, also as tables."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from prefect_tune.arrow_tables import attempts_to_arrow, find_metric_columns, read_curves, read_reports, trials_to_arrow
from prefect_tune.blocks import StorageTarget, resolve_existing
from prefect_tune.core.display_text import find_nearest_name, first_line
from prefect_tune.core.errors import CheckpointNotFound, InvalidInput
from prefect_tune.core.experiment.cost import ExperimentCost, compute_cost
from prefect_tune.core.experiment.experiment import Experiment
from prefect_tune.core.experiment.summary import (
    LearningCurves,
    Losses,
    Scope,
    compute_losses,
    count_by_status,
    find_checkpoint_config,
    find_pareto_front,
    find_trial,
    format_best_label,
    objective_from_settings,
    rank_checkpoints,
    rank_trials,
    require_trial,
    score_reports,
    sort_by_losses,
    validate_scope,
)
from prefect_tune.core.experiment.trial_transitions import (
    ENDED_PHASES,
    Status,
    Trial,
    list_live_checkpoint_keys,
    newest_checkpoint_key,
)
from prefect_tune.core.journal.journal import load_experiment, read_entries
from prefect_tune.core.messages.target_messages import read_live_status
from prefect_tune.core.metrics import describe_non_number, short_repr
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.search.objective import Mode, Objective, make_objective
from prefect_tune.core.search_view import SearchSnapshot
from prefect_tune.core.storage.generations import find_current_journal, no_experiment_message
from prefect_tune.core.storage.layout import CheckpointKey, ResultsTable
from prefect_tune.core.values import StepReport, flatten, get_metric, parse_time
from prefect_tune.notebook import (
    MAX_ROWS,
    CurvePoints,
    format_omitted_trials,
    render_results_html,
    render_trials_html,
    select_curve_points,
)
from prefect_tune.reporting.facts import make_report_input
from prefect_tune.runtime.checkpoint import Checkpoint
from prefect_tune.terminal.formatting import format_counts, get_output_width, render_text
from prefect_tune.terminal.progress_view import find_metric_names, make_trials_table

if TYPE_CHECKING:
    import pyarrow as pa

ArrowTable: TypeAlias = Any
"""A `pyarrow.Table`. The type is `Any` because pyarrow has no types, and strict type checkers would report each use."""
DataFrame: TypeAlias = Any
"""A `pandas.DataFrame`. The type is `Any` because pandas may not be installed."""

_TIMEOUT = timedelta(minutes=10)
_DISPLAY_TIMEOUT = timedelta(seconds=20)


def load_results(
    target: StorageTarget | str | os.PathLike[str],
    experiment: str,
    *,
    metric: str | Sequence[str] | None = None,
    mode: Mode | Sequence[Mode] = "min",
) -> Results:
    """Read the results of an experiment from its target, up to the last journal entry. Nothing is run or written.

    The experiment may still be running.

    ```python
    results = pt.load_results("runs", "digits")
    print(results.best.config, results.best.metrics)
    ```

    Args:
        target: where the experiment is stored: a block, a `"block-type/name"` slug, a URI, or a path.
        metric: the reported metric or metrics to compare trials by. Default: the metric and mode of the search.
        mode: `"min"` if small values of `metric` are good, else `"max"`; one mode for all metrics, or one for each.

    Raises:
        InvalidInput: the target has no such experiment.
        JournalCorrupt: entries of its journal are missing or damaged.
        StoreUnavailable: the target did not answer.
    """
    storage = resolve_existing(target)
    with storage.open(timeout=_TIMEOUT) as store:
        state = load_experiment(store, find_current_journal(store, experiment))
        if not state.entry_count:
            raise InvalidInput(no_experiment_message(store, experiment, storage.uri))
    return Results(state, storage, _choose_objective(objective_from_settings(state.settings), metric, mode))


def _choose_objective(
    default: Objective | None, metric: str | Sequence[str] | None, mode: Mode | Sequence[Mode]
) -> Objective | None:
    """Return the objective of `metric` and `mode`; if `metric` is None, return `default`, the search's objective.

    Raises:
        InvalidInput: `metric` is None, but `mode` is neither the default nor the mode of the search.
    """
    if metric is not None:
        return make_objective(metric, mode)
    if default is not None and mode != "min" and make_objective(default.metrics, mode) != default:
        modes = ", ".join(f"{mode} {name}" for name, mode in zip(default.metrics, default.modes, strict=True))
        raise InvalidInput(f"mode {mode!r} without a metric: the search has {modes}; pass the metric too")
    return default


class Trials(Mapping[str, Trial]):
    """The trials of an experiment, by their names. `print` and a notebook show the first 20 of them as a table."""

    def __init__(self, trials: Mapping[str, Trial], metrics: Sequence[str] = ()) -> None:
        """Args: metrics: the metrics to show. Default: the metrics of the first trial that has reported any."""
        self._trials = trials
        self._metrics = metrics

    def __getitem__(self, name: str) -> Trial:
        if trial := find_trial(self._trials, str(name)):
            return trial
        names = ", ".join([*islice(self._trials, 3), *["..."] * (len(self) > 3)])
        raise KeyError(f"there is no trial {name!r}; expected one of: {names or 'none'}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    def __repr__(self) -> str:
        if not self:
            return "no trials"
        first, metrics, more = self._select_first_trials()
        table, hidden = make_trials_table(first, metrics)
        return "\n".join(filter(None, (render_text(table, width=get_output_width()), hidden, more)))

    def _repr_html_(self) -> str:
        first, metrics, more = self._select_first_trials()
        return render_trials_html(first, metrics, more if first else "no trials")

    def _select_first_trials(self) -> tuple[Sequence[Trial], Sequence[str], str]:
        """Return the trials to show, their metrics, and a text with the number of the other trials."""
        first = list(self.values())[:MAX_ROWS]
        return first, self._metrics or find_metric_names(first), format_omitted_trials(len(self) - len(first))


@dataclass(frozen=True, repr=False)
class Results:
    """The state of an experiment when it was read. Learning curves, reports and checkpoints are read on demand."""

    experiment: Experiment
    target: StorageTarget
    """Where the experiment is stored."""
    objective: Objective | None
    """The metrics by which trials are compared; None if the experiment has no metric."""

    @property
    def trials(self) -> Trials:
        """All trials by name, in the order in which they were proposed."""
        return Trials(self.experiment.trials, self.objective.metrics if self.objective else ())

    @cached_property
    def errors(self) -> Mapping[str, str]:
        """The error of each errored trial, by the trial's name."""
        return {trial.id: trial.reason for trial in self.trials.values() if trial.status is Status.ERRORED}

    @cached_property
    def cost(self) -> ExperimentCost:
        """The seconds of the experiment's slots in each `CostCategory`, in total and for each run and attempt.

        The time of a running attempt is counted up to the newest live status on the target.
        """
        return self._read_cost(_TIMEOUT)

    def _read_cost(self, timeout: timedelta) -> ExperimentCost:
        until = parse_time(self.experiment.runs[0].began_at) if self.experiment.runs else None
        if any(trial.status is Status.RUNNING for trial in self.trials.values()):
            with self.target.open(timeout=timeout) as store:
                live_status = read_live_status(store, self.experiment)
            until = (parse_time(live_status.run_at or live_status.at) if live_status is not None else None) or until
        return compute_cost(self.experiment, until or datetime.now(UTC))

    # ------------------------------------------------------------------------------------------------- the best

    @property
    def best(self) -> Trial:
        """The result of `best_trial()`: the trial with the best last report."""
        return self.best_trial()

    def best_trial(
        self, metric: str | Sequence[str] | None = None, mode: Mode | Sequence[Mode] = "min", *, scope: Scope = "last"
    ) -> Trial:
        """Return the best trial; of equal trials, the one that was proposed first.

        Running and errored trials are compared too; check the `status` of the returned trial.

        ```python
        trial = results.best_trial("accuracy", "max", scope="all")
        ```

        Args:
            metric: the metric to compare by, or several: later ones break ties. Default: that of the search.
            mode: the mode of `metric`, see `load_results`.
            scope: which reports of a trial are compared: the last (`"last"`, as in `prefect-tune show`), the best
                (`"all"`), the mean of all (`"avg"`), or of the last five or ten (`"last-5-avg"`, `"last-10-avg"`).

        Raises:
            InvalidInput: there is no metric to compare by, or no trial reported it.
        """
        return self._rank_trials(self._require_objective(metric, mode), validate_scope(scope))[0][0]

    @property
    def best_trials(self) -> Sequence[Trial]:
        """The trials that no other trial dominates, compared by their last reports.

        With several metrics, these are the Pareto front, sorted by the first metric. Raises the errors of `best_trial`.
        """
        return find_pareto_front(self._rank_trials(self._require_objective(None, "min"), "last"))

    def _require_objective(self, metric: str | Sequence[str] | None, mode: Mode | Sequence[Mode]) -> Objective:
        objective = _choose_objective(self.objective, metric, mode)
        if objective is None:
            names = sorted({name for trial in self.trials.values() for name in flatten(trial.metrics)})
            example = names[0] if len(names) == 1 else "NAME"
            raise InvalidInput(
                f"experiment {self.experiment.name!r}: no metric to compare by; its reports have {names}. Pass one: "
                f"results.best_trial({example!r}), or pt.load_results(..., metric={example!r})"
            )
        return objective

    def _rank_trials(self, objective: Objective, scope: Scope) -> Sequence[tuple[Trial, Losses]]:
        trials = self.trials.values()
        if scope == "last":
            ranking = rank_trials(trials, objective)
        else:
            curves = self._read_metric_curves(objective.metrics)
            scores = ((trial, score_reports(curves.get(trial.id, ()), objective, scope)) for trial in trials)
            ranking = sort_by_losses(scores)
        if not ranking:
            curves = self._read_metric_curves(objective.metrics)
            reason = no_ranking_reason(trials, objective, scope, curves)
            names, count = ", ".join(objective.metrics), len(self.trials)
            problem = f"none of its {count} trials has reported {names}"
            reports = (*chain.from_iterable(curves.values()), *(trial.metrics for trial in trials))
            if any(get_metric(report, name) is not None for report in reports for name in objective.metrics):
                compared = "last report" if scope == "last" else "report"
                problem = f"no {compared} of its {count} trials has {names} as a number"
            raise InvalidInput(f"experiment {self.experiment.name!r}: {problem}: {reason}")
        return ranking

    def _read_metric_curves(self, metrics: Sequence[str]) -> Mapping[str, Sequence[Mapping[str, object]]]:
        columns = find_metric_columns(self._reports, metrics)
        curves: dict[str, list[Mapping[str, object]]] = defaultdict(list)
        for row in self._reports.select(["trial", *columns.values()]).to_pylist():
            curves[row["trial"]].append({name: row[column] for name, column in columns.items()})
        return curves

    # ------------------------------------------------------------------------------------------------ one trial

    def curve(self, trial: str | Trial) -> Sequence[StepReport]:
        """Return the learning curve of a trial: one report per step, the newest if a retry has repeated the step.

        ```python
        losses = [report.metrics["loss"] for report in results.curve("00003")]
        ```
        """
        return self._curves.get_curve(self._require_trial(trial).id)

    @cached_property
    def _curves(self) -> LearningCurves:
        with self.target.open(timeout=_TIMEOUT) as store:
            return read_curves(store, self.experiment)

    def checkpoint(self, trial: str | Trial) -> Checkpoint | None:
        """Return the newest committed checkpoint of a trial; None if the trial has none.

        ```python
        checkpoint = results.checkpoint(results.best)
        ```
        """
        (current,) = self._reload_trials(trial)
        key = newest_checkpoint_key(self.experiment.trial_key(current.id), current)
        return self.target.checkpoint(key) if key else None

    def export(
        self,
        directory: str | os.PathLike[str],
        trial: str | Trial | None = None,
        *,
        step: int | None = None,
        plain: bool = False,
    ) -> str:
        """Write a checkpoint to a directory, with its trial's configuration and metrics; return the directory's path.

        The configuration is in `config.json` and the metrics are in `metrics.json`. If the checkpoint itself has a
        file of one of these names, `trial-config.json` or `trial-metrics.json` is written instead.

        ```python
        results.export("best-model")
        ```

        Args:
            directory: a new or empty directory, or a directory with an earlier export of this checkpoint.
            trial: the trial. Default: the best one.
            step: the step of the checkpoint. Default: the newest one.
            plain: write only the files of the checkpoint.

        Raises:
            CheckpointNotFound: the trial has no such checkpoint.
            InvalidInput: the directory has other content, which is not changed, or there is no such trial.
        """
        (current,) = self._reload_trials(self.best if trial is None else trial)
        keys = list_live_checkpoint_keys(self.experiment.trial_key(current.id), current)
        matching_keys = [key for key in keys if step in (None, key.step)]
        if not matching_keys:
            steps = ", ".join(str(key.step) for key in keys) or "none"
            step_text = "" if step is None else f" of step {step}"
            raise CheckpointNotFound(f"trial {current.id}: there is no checkpoint{step_text}; steps with one: {steps}")
        export_checkpoint(self.target, self.experiment, current, matching_keys[-1], directory, plain=plain)
        return os.fspath(directory)

    def best_checkpoint(
        self,
        trial: str | Trial | None = None,
        metric: str | Sequence[str] | None = None,
        mode: Mode | Sequence[Mode] = "min",
    ) -> Checkpoint | None:
        """Return the checkpoint with the best metrics, of one trial or of all; None if no checkpoint has the metrics.

        Its trial may differ from `best_trial`, since that method compares last reports. With several metrics, further
        metrics break ties. If checkpoints are equally good, return the oldest one of the trial that was proposed first.
        For a single trial, this is the checkpoint that `Retention(best=1)` keeps.

        ```python
        checkpoint = results.best_checkpoint(metric="accuracy", mode="max")
        ```

        Args:
            trial: the trial. Default: all trials.
            metric: see `best_trial`.
            mode: see `best_trial`.

        Raises:
            InvalidInput: there is no metric to compare by, or no such trial.
        """
        objective = self._require_objective(metric, mode)
        saved = {current.id: rank_checkpoints(current.checkpoints, objective) for current in self._reload_trials(trial)}
        losses = ((name, compute_losses(refs[0].metrics, objective)) for name, refs in saved.items() if refs)
        for name, _ in sort_by_losses(losses)[:1]:
            return self.target.checkpoint(self.experiment.trial_key(name).checkpoint_key(saved[name][0]))
        return None

    def _reload_trials(self, trial: str | Trial | None) -> Sequence[Trial]:
        """Return `trial`, or all trials if None; if any had not ended, read them again, since they may have changed."""
        trials = [self._require_trial(trial)] if trial is not None else list(self.trials.values())
        if all(earlier.phase in ENDED_PHASES for earlier in trials):
            return trials
        with self.target.open(timeout=_TIMEOUT) as store:
            state = load_experiment(store, self.experiment.key)
        return [state.trials.get(earlier.id, earlier) for earlier in trials]

    def _require_trial(self, trial: str | Trial) -> Trial:
        return require_trial(self.experiment, trial.id if isinstance(trial, Trial) else trial)

    # --------------------------------------------------------------------------------------------------- tables

    def to_arrow(self, rows: ResultsTable | Literal["attempts"] = "trials") -> ArrowTable:
        """Return a table with a row for each trial, for each report of the learning curves, or for each attempt.

        Nested configurations and metrics become columns such as `config/model/depth`. The reports of an ended
        experiment are read from the file that was written at its end, those of a running experiment from its journal.
        The rows of attempts have the seconds by category (see `cost`), the processor time and the memory.

        ```python
        table = results.to_arrow("reports")
        ```

        Raises:
            InvalidInput: `rows` is not `"trials"`, `"reports"` or `"attempts"`.
        """
        match rows:
            case "trials":
                return trials_to_arrow(self.experiment)
            case "reports":
                return self._reports
            case "attempts":
                return attempts_to_arrow(self.cost)
            case _:
                raise InvalidInput(f"rows {rows!r}: expected 'trials', 'reports' or 'attempts'")

    def to_pandas(self, rows: ResultsTable | Literal["attempts"] = "trials") -> DataFrame:
        """Return the table of `to_arrow` as a pandas `DataFrame`.

        ```python
        frame = results.to_pandas("attempts")
        ```

        Raises:
            InvalidInput: pandas is not installed.
        """
        try:
            import pandas as pd  # noqa: F401  without pandas, pyarrow's `to_pandas` raises a less clear error
        except ImportError as missing:
            install = "pip install 'prefect-tune[pandas]'"
            raise InvalidInput(f"to_pandas needs pandas: {install}; `to_arrow` works without pandas") from missing
        return self.to_arrow(rows).to_pandas()

    @cached_property
    def _reports(self) -> pa.Table:
        return self._read_reports(_TIMEOUT)

    def _read_reports(self, timeout: timedelta) -> pa.Table:
        with self.target.open(timeout=timeout) as store:
            return read_reports(store, self.experiment)

    def _repr_html_(self) -> str:
        """Return HTML for a notebook; each read of curves or of the live status takes at most 20 s."""
        snapshot, uri = SearchSnapshot(self.experiment), self.target.uri
        report = make_report_input(snapshot, objective=self.objective, uri=uri, now=datetime.now(UTC))
        return render_results_html(report, self._read_curve_points, partial(self._read_cost, _DISPLAY_TIMEOUT))

    def _read_curve_points(self, trials: Sequence[str], metrics: Sequence[str]) -> CurvePoints:
        """Return the downsampled learning curves of `trials`. Raises the target's errors."""
        reports = self._reports if "_reports" in vars(self) else self._read_reports(_DISPLAY_TIMEOUT)
        return select_curve_points(reports, trials, metrics)

    def __repr__(self) -> str:
        best = ""
        if self.objective is not None and (ranking := rank_trials(self.trials.values(), self.objective)):
            values = ", ".join(f"{name} {get_metric(ranking[0][0].metrics, name)}" for name in self.objective.metrics)
            best = f", {format_best_label(self.objective)}: {ranking[0][0].id} with {values}"
        counts = format_counts(count_by_status(self.experiment))
        return f"Results(experiment={self.experiment.name!r}, trials: {counts}{best})"


# Why there is no best trial.

_MetricsByTrial = Mapping[str, Sequence[Mapping[str, object]]]


def no_ranking_reason(trials: Collection[Trial], objective: Objective, scope: Scope, curves: _MetricsByTrial) -> str:
    """Return the reason why no trial can be ranked by `scope`; `curves` has all reports of all trials."""
    for trial in trials:
        for name in objective.metrics:
            if kind := describe_non_number(value := get_metric(trial.metrics, name)):
                return f"trial {trial.id} reported {name!r} as {kind}, not as a number: {short_repr(value)}"
    names = sorted({name for trial in trials for name in flatten(trial.metrics)})
    if scope == "last" and names and any(score_reports(reports, objective, "all") for reports in curves.values()):
        return f"the last reports have {names}; scope='all' compares all reports"
    if trials and all(trial.status is Status.ERRORED for trial in trials):
        first = next(iter(trials))
        return f"all {len(trials)} errored, the first with {first_line(first.reason)}; see results.errors"
    if not names:
        return "nothing was reported"
    by_last_part = {name.rpartition("/")[2]: name for name in names}
    for metric in objective.metrics:  # suggest a similar name, or a name with a similar last part
        last_part = find_nearest_name(metric, by_last_part) or metric
        similar = find_nearest_name(metric, names) or by_last_part.get(last_part)
        if metric not in names and similar is not None:
            return f"their reports have {names}; did you mean {similar!r}?"
    return f"their reports have {names}"


# Export a checkpoint: the files that the trainable saved, with the configuration and metrics of its trial.

_CONFIG_FILE, _METRICS_FILE = "config.json", "metrics.json"


def export_checkpoint(
    target: StorageTarget,
    experiment: Experiment,
    trial: Trial,
    key: CheckpointKey,
    directory: str | os.PathLike[str],
    *,
    plain: bool = False,
) -> Mapping[str, str]:
    """Write a checkpoint to `directory`, with its trial's configuration and metrics as JSON files.

    A second call completes an interrupted export. `plain` omits the two JSON files.

    Returns:
        A mapping from each default name, such as `config.json`, to the name of the written file, for example
        `trial-config.json` if the checkpoint itself has a `config.json`. With `plain`, the mapping is empty.

    Raises:
        InvalidInput: the directory has other content, which is not changed.
        CheckpointNotFound, CheckpointCorrupt: see `Checkpoint.to_directory`.
    """
    folder = experiment.trial_key(trial.id)
    ref = next(ref for ref in reversed(trial.checkpoints) if folder.checkpoint_key(ref) == key)
    config: Mapping[str, object] = trial.config
    with target.open(timeout=_TIMEOUT) as store:
        manifest = read_manifest(store, key)
        paths = [*(file.path for file in manifest.files), *manifest.empty_directories]
        taken_names = {path.partition("/")[0] for path in paths}
        if trial.last_clone_sequence is not None:  # after an exploit, `trial.config` may be newer than the checkpoint
            config = find_checkpoint_config(read_entries(store, experiment.key), trial.id, ref.sequence)
    names: dict[str, str] = {}
    for name in (_CONFIG_FILE, _METRICS_FILE):
        candidates = chain((name, f"trial-{name}"), (f"trial-{number}-{name}" for number in count(2)))
        names[name] = next(candidate for candidate in candidates if candidate not in taken_names)
    contents = {names[_CONFIG_FILE]: _encode_json(config), names[_METRICS_FILE]: _encode_json(ref.metrics)}
    folder_path = Path(directory).expanduser()
    for name, content in contents.items():  # remove files of an earlier export, even incomplete ones; keep other files
        file_path = folder_path / name
        with suppress(FileNotFoundError, NotADirectoryError):
            if not file_path.is_symlink() and file_path.is_file() and content.startswith(file_path.read_bytes()):
                file_path.unlink()
    target.checkpoint(key).to_directory(folder_path)
    for name, content in {} if plain else contents.items():
        (folder_path / name).write_bytes(content)
    return {} if plain else names


def _encode_json(value: object) -> bytes:
    return f"{json.dumps(value, indent=2, ensure_ascii=False)}\n".encode(errors="backslashreplace")
