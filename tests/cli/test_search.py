"""Searches from the command line: run, interrupted, resumed, stopped, and refused calls."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import prefect_tune as pt
from prefect_tune.cli.search import options_to_parameters, parse_space_option
from prefect_tune.core.errors import InvalidInput
from tests.fakes.command_line import PROGRAM, CommandResult, Run
from tests.fakes.pages import ROOT, blocks_of
from tests.fakes.searches.experiments import write_search
from tests.fakes.servers.processes import free_port
from tests.fakes.trial_processes import wait_until
from tests.fakes.untrusted import TRAIN as TRUSTED
from tests.fakes.untrusted import Untrusted, make_untrusted_target, write_settings

TRAIN = "tests.trainables.moody:train"
MOODY = "tests.trainables.moody:Moody"


@pytest.fixture
def search(run: Run, prefect_server: str, tmp_path: Path) -> Callable[..., CommandResult]:
    """Run a search called `e` from the command line, with a server, which limits runs by their tags."""
    assert prefect_server

    def run_search(trainable: str, *arguments: object) -> CommandResult:
        return run("run", trainable, "--target", tmp_path, "--experiment", "e", "--metric", "loss", *arguments)

    return run_search


@pytest.mark.long
def test_a_search_of_which_trials_errored_ends_with_3_and_can_rerun_them(
    search: Callable[..., CommandResult], run: Run, tmp_path: Path
) -> None:
    options = ("--set", "fails=raise", "--set", f"until={tmp_path / 'mended'}", "--stop", "step=3")
    result = search(MOODY, *options, "--num-samples", 1)
    assert result.code == 3
    assert "in a mood" in result.out
    entry_count = pt.load_results(tmp_path, "e").experiment.entry_count
    (tmp_path / "mended").touch()
    errored_only = run("resume", tmp_path, "e", "--only-errored", "--num-samples", 2, "--json")
    assert json.loads(errored_only.out)["trials_by_status"] == {"completed": 1}
    again = run("resume", tmp_path, "e", "--rerun-errored", "--num-samples", 2, "--json")
    assert again.code == 0
    assert json.loads(again.out)["trials_by_status"] == {"completed": 2}
    forked = run("resume", tmp_path, "e", "--fork", "f", "--at", entry_count, "--json")
    assert forked.code == 3
    assert json.loads(forked.out)["trials_by_status"] == {"errored": 1}
    seed = ("--seed", pt.load_results(tmp_path, "f").experiment.settings["seed"])
    rerun = search(MOODY, *options, *seed, "--num-samples", 1, "--experiment", "f", "--rerun-errored", "--json")
    assert json.loads(rerun.out)["trials_by_status"] == {"completed": 1}


@pytest.mark.usefixtures("no_prefect_server")
def test_a_report_without_the_metric_is_an_error_of_its_trial(run: Run, tmp_path: Path) -> None:
    options = ("--target", tmp_path, "--experiment", "e", "--metric", "accuracy", "--stop", "step=3")
    grid = ("--set", "fails=grid_search(raise,not)", "--num-samples", 1)
    result = run("run", MOODY, *options, *grid, "--isolation", "thread")
    assert result.code == 3
    assert "expected a number for metric 'accuracy', found None; the report has ['loss']" in result.err
    assert "2 errored" in result.out


def test_every_option_arrives(search: Callable[..., CommandResult], tmp_path: Path) -> None:
    write_search(tmp_path, "first", {"00000": 0.5})
    (tmp_path / "space.yaml").write_text("x: {uniform: [0, 1e-1]}\nfails: no\n")
    result = search(
        MOODY,
        *("--space", tmp_path / "space.yaml", "--set", "depth.of.it=[1, 2]", "--mode", "max", "--num-samples", 2),
        *("--scheduler", '{"ASHA": {"max_t": 4, "variant": "stopping"}}'),
        *("--search", '{"RandomSearch": {"num_samples": 2}}', "--seed", 7, "--keep-best", 2),
        *("--stop", "step=2", "--max-concurrent-trials", 1, "--checkpoint-every", 1, "--keep-last", 1),
        *("--max-failures", 2, "--fail-fast", "--isolation", "thread", "--json", "--resource", "cpu=0.5"),
        *("--tag", "mine", "--grace-period-seconds", 3, "--silence-timeout-seconds", 60, "--resume", "never"),
        *("--on-code-change", "refuse", "--warm-start", "first"),
    )
    assert result.code == 0
    output = json.loads(result.out)
    assert output["trials"][0]["config"]["depth"] == {"of": {"it": [1, 2]}}
    assert all(0 <= trial["config"]["x"] <= 0.1 for trial in output["trials"])
    assert [trial["trial"] for trial in output["trials"]] == ["00001", "00000"], "the best trial is the first"
    assert max(len(trial["checkpoints"]) for trial in output["trials"]) == 2
    settings = output["settings"]
    assert settings["retention"] == {"last": 1, "best": 2, "metric": "loss", "mode": "max", "every": None}
    assert settings["warm_start"] == ["first"]
    assert list(pt.load_results(tmp_path, "e").experiment.warm_starts) == ["first"]
    assert (settings["mode"], settings["num_samples"], settings["seed"]) == ("max", 2, 7)
    assert (settings["stop"], settings["fail_fast"], settings["isolation"]) == ({"step": 2}, True, "thread")
    assert {"checkpoint", "retention", "failures", "scheduler", "search", "max_concurrent_trials"} <= set(settings)


@pytest.mark.parametrize("mode", [[], ["min"], ["max"], ["max", "min"]])
def test_the_best_checkpoints_to_keep_are_those_by_the_first_metric(mode: list[str]) -> None:
    options = {"keep_best": 2, "keep_last": None, "metric": ["loss", "size"], "mode": mode}
    expected = pt.Retention(best=2, metric="loss", mode="max" if mode[:1] == ["max"] else "min")
    assert options_to_parameters(options)["retention"] == expected
    with pytest.raises(InvalidInput, match=r"--keep-best: .* --metric NAME"):
        options_to_parameters({"keep_best": 2, "metric": []})
    assert options_to_parameters({"keep_last": 3, "metric": []}) == {"retention": pt.Retention(last=3)}


def test_a_search_cannot_both_stop_at_the_first_error_and_at_none() -> None:
    assert options_to_parameters({"fail_fast": False, "ignore_errors": True}) == {"fail_fast": False}
    with pytest.raises(InvalidInput, match="pass only one"):
        options_to_parameters({"fail_fast": True, "ignore_errors": True})


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_with_130_and_says_how_to_go_on(
    prefect_server: str, run: Run, tmp_path: Path, interrupt: signal.Signals
) -> None:
    command = ["run", "tests.trainables.digits_table:DigitsTable", "--target", str(tmp_path), "--experiment", "e"]
    command += ["--set", "row=grid_search(1,2)", "--set", "step_seconds=0.2", "--num-samples", "1", "--stop", "step=20"]
    process = subprocess.Popen(
        [*PROGRAM, *command, "--checkpoint-every", "1"],
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    wait_until(lambda: any(tmp_path.glob("e/1/trials/*/checkpoints/*/manifest.json")), seconds=150)
    process.send_signal(interrupt)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    resume_command = f"prefect-tune resume {tmp_path} e --trainable tests.trainables.digits_table:DigitsTable"
    assert errors.splitlines()[-1] == f"stopped; resume with: {resume_command}"
    resumed = run("resume", tmp_path, "e", "--json", "--stop", "step=8")
    assert resumed.code == 0
    trials = json.loads(resumed.out)["trials"]
    assert [(trial["status"], trial["step"] >= 8) for trial in trials] == [("completed", True)] * 2


def test_interrupted_before_a_flow_run_it_names_no_experiment_to_resume(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_interrupt(_parameters: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prefect_tune.cli.search.check_parameters", raise_interrupt)
    result = run("run", TRAIN, "--target", tmp_path, "--experiment", "e", "--set", "x=1")
    assert (result.code, result.out, result.err) == (130, "", "stopped before the run began; nothing was started\n")


def test_a_word_that_is_no_choice_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    result = run("run", TRAIN, "--target", tmp_path, "--experiment", "e", "--mode", "biggest")
    assert result.code == 2
    assert "'biggest' is not one of 'min', 'max'" in result.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "lr"], "--set 'lr': expected name=value, such as lr=loguniform(1e-4,1e-1)"),
        (
            ["--set", "lr=logunif(1,2)"],
            "--set 'lr=logunif(1,2)': unknown distribution 'logunif'; did you mean 'loguniform'? put a text",
        ),
        (
            ["--set", "lr=loguniform(0.1,1e-4)"],
            "lr: loguniform(0.1, 0.0001): expected low < high, found low=0.1 and high=0.0001; did you mean loguniform(",
        ),
        (["--set", "n=choice[1,2]"], "--set 'n=choice[1,2]': expected choice(...) in"),
        (["--set", "n=choice([1,2],adam)"], "--set 'n=choice([1,2],adam)': expected JSON in the parentheses"),
        (["--set", "a=1", "--set", "a.b=2"], "--set 'a.b=2': expected 'a' to be an object"),
        (["--stop", "loss"], "--stop 'loss': expected step=100, or package.module:name"),
        (["--stop", "MaxFailures=5"], 'stop: MaxFailures is a stopper: expected {"MaxFailures": {"failures": 3}}'),
        (["--resource", "gpu=all"], "resources_per_trial.gpu: Input should be a valid number"),
        (["--num-samples", 3, "--samples-per-run", 2], "num_samples=3 is the total, samples_per_run=2 is what"),
        (["--job-variable", "memory"], "--job-variable 'memory': expected name=value"),
        (["--space", "nowhere.json"], "--space nowhere.json: [Errno 2] No such file or directory: 'nowhere.json'"),
        (["--space", "README.md"], "--space README.md: not valid JSON: "),
        (["--set", "a..b=1"], "--set 'a..b=1': expected name=value"),
        (["--scheduler", "{ASHA}"], "--scheduler: not valid JSON: "),
        (["--scheduler", "ASHA"], 'scheduler: ASHA needs max_t: {"ASHA": {"max_t": 81}}'),
    ],
)
def test_what_cannot_be_understood_ends_with_2_before_a_server_is_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{free_port()}/api")
    result = run("run", TRAIN, "--target", tmp_path, "--experiment", "e", "--set", "x=1", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("prefect-tune: ")
    assert message in result.err
    assert result.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_in_quotes_is_a_text_though_it_looks_like_a_domain() -> None:
    settings = ["a=choices", "b=uniformly", 'c="choice(1"', "d=choice(adam,sgd)", 'e=choice("a,b","c")', "f=[a-z]+"]
    assert parse_space_option(None, settings) == {
        "a": "choices",
        "b": "uniformly",
        "c": "choice(1",
        "d": {"choice": ["adam", "sgd"]},
        "e": {"choice": ["a,b", "c"]},
        "f": "[a-z]+",
    }


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frist"], "there is no experiment 'frist' at {target}; did you mean 'first'?"),
        (["first", "--num-samples", 3], "num_samples: experiment 'first' already has 10 samples, and this run passes"),
        (["first", "--at", 2], "at: a resume starts at the last entry; to start at another entry, pass fork="),
        (["first"], "the journal of experiment 'first' does not store 'trainable', 'sync'"),
    ],
)
def test_what_cannot_be_resumed_is_one_error(run: Run, tmp_path: Path, arguments: list[object], message: str) -> None:
    write_search(tmp_path, "first", {"00000": 0.5}, settings={"only_in_code": ["sync"]})
    result = run("resume", tmp_path, *arguments)
    assert result.code == (1 if arguments == ["frist"] else 2)
    assert message.format(target=tmp_path.as_uri()) in result.err


# `prefect-tune stop` where no process runs the search: its messages, and its exit code.


def test_the_commands_on_the_page_ask_for_what_they_say(
    moods: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(moods / "moods", tmp_path / "runs" / "moods")
    monkeypatch.chdir(tmp_path)
    blocks = blocks_of(ROOT / "docs" / "stopping.md")
    lines = "".join(block.code for block in blocks if block.language == "bash").splitlines()
    stops = [line for line in lines if line.startswith("prefect-tune stop ")]
    stop_trial, stop_experiment = (shlex.split(line.replace(" digits", " moods"))[1:] for line in stops)
    trial = run(*stop_trial, "--wait-seconds", 0)
    assert (trial.code, trial.out) == (0, "trial 00001 is completed at step 3: step 3 of 3\n")
    experiment = run(*stop_experiment)
    assert (experiment.code, experiment.out) == (0, "experiment 'moods' has ended, with all of its 4 trials\n")
    assert not (tmp_path / "runs" / "moods" / "1" / "requests").exists()


def test_where_nobody_answers_it_ends_with_1(moods: Path, run: Run, tmp_path: Path) -> None:
    shutil.copytree(moods / "moods", tmp_path / "moods")
    shutil.rmtree(tmp_path / "moods" / "1" / "results")  # between two trials, or killed before it could publish them
    result = run("stop", tmp_path, "moods", "--wait-seconds", 0.1, "--json")
    assert result.code == 1
    answer = json.loads(result.out)
    assert (answer["status"], "no run has answered" in answer["message"]) == ("unanswered", True)
    assert "a run that begins later is not stopped by this" in answer["message"]
    assert len(list((tmp_path / "moods" / "1" / "requests").iterdir())) == 1


# The code that `prefect-tune resume` runs: the command line names it, never a target.


@pytest.fixture
def untrusted_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Untrusted:
    return make_untrusted_target(tmp_path, monkeypatch)


@pytest.mark.usefixtures("no_prefect_server")
@pytest.mark.parametrize("setting", ["trainable", "sample_from", "stop", "callbacks", "syncer"])
def test_what_a_journal_chooses_is_refused_in_words_that_say_what_to_pass(
    setting: str, run: Run, untrusted_search: Untrusted
) -> None:
    untrusted_search.forge(setting)
    options = [] if setting == "trainable" else ["--trainable", TRUSTED]
    result = run("resume", untrusted_search.target.path, "e", *options)
    assert result.code == 1
    assert f"'{untrusted_search.module}:" in result.err
    assert "If the journal is yours, pass: pt.resume('e'" in result.err
    assert not untrusted_search.marker.exists()
    assert untrusted_search.module not in sys.modules


@pytest.mark.usefixtures("no_prefect_server")
def test_a_trainable_that_is_named_is_run(run: Run, untrusted_search: Untrusted) -> None:
    settings = {"space": {"x": 1.0}, "num_samples": 1, "metric": "loss", "isolation": "thread"}
    write_settings(untrusted_search.target, "e", {"trainable": TRUSTED, **settings})
    assert run("resume", untrusted_search.target.path, "e").code == 1
    assert run("resume", untrusted_search.target.path, "e", "--trainable", TRUSTED).code == 0
