"""The verdict of a drill and its sentences, what was probably not restored, and the interval of checkpoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import exp

import pytest

from prefect_tune.core.checkpoints.manifest import CheckpointMetadata, FileRef, Manifest
from prefect_tune.core.errors import TuneError
from prefect_tune.drills.evidence import (
    CHECKPOINTS,
    GENERATORS,
    METRICS,
    Difference,
    DrillRun,
    Kill,
    MeasuredSave,
    ProbeRecord,
)
from prefect_tune.drills.findings import (
    DrillReport,
    RunComparison,
    compute_optimal_interval,
    find_unrestored_states,
    make_drill_report,
)
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.run_drill import require_resume_from_checkpoint
from prefect_tune.drills.values import FileDifference

PLAN = DrillPlan("my.module:Net", steps=4, save_every=2, kills=((3, "trial"),))
MANIFEST = Manifest(
    experiment="e",
    generation=1,
    trial="trial",
    step=2,
    sequence=1,
    metadata=CheckpointMetadata(attempt=1, term=1, write_id="w", created_at=""),
    blobs=(),
    files=tuple(FileRef(path=name, size_bytes=0) for name in "abc"),
)
CHANGED = MANIFEST.model_copy(update={"files": (FileRef(path="d", size_bytes=0),)})
DIGESTS = [f"{number:016x}" for number in range(100)]


def make_run(kills: Sequence[Kill] = ()) -> DrillRun:
    records = [ProbeRecord(step, 1, False, float(step), 0.5, 0.2 if step == 3 else 0.0, {}) for step in range(1, 5)]
    metrics = {step: {"loss": 1 / step} for step in range(1, 5)}
    return DrillRun(metrics, {2: MANIFEST}, [MeasuredSave(2, 2048, 512, 0.1)], records, kills)


def make_report(
    differences: Sequence[Difference] = (),
    unstable: Sequence[Difference] = (),
    changing: Collection[tuple[str, str]] = (("m.pt", "w"), ("m.pt", "v")),
) -> DrillReport:
    killed = make_run([Kill("trial", 3, 2, 4.2)])
    again = make_run() if differences else None
    return make_drill_report(PLAN, "drill-0", RunComparison(make_run(), killed, again, differences, unstable, changing))


def make_diff(step: int, file: str, key: str, what: str = "2, expected 1") -> Difference:
    return Difference(step, FileDifference(file, key, what))


def test_runs_that_are_the_same_are_exact_and_the_costs_are_said() -> None:
    report = make_report()
    assert (report.verdict, report.is_exact) == ("exact", True)
    headline = "exact: the run that was killed 1 time equals the undisturbed run"
    assert list(report.lines()) == [
        f"{headline}; 4 metric values and 3 checkpoint files of 4 steps compared",
        "  kill of the trial after step 3: resumed from step 2, trained 1 step again, next step done after 4.2 s",
        "  a save: 2 KiB, 512 B of it sent, in 0.10 s; training waits 0.20 s",
        "  with a failure every 24 h: save every 186 s (372 steps), which loses the least time, 0.2%",
    ]


def test_the_first_difference_is_named_and_up_to_where_the_runs_are_equal() -> None:
    first_diff = make_diff(3, "optimizer.pt", "state.3.exp_avg", "1 of 4,096 values, max |Δ| 2e-09")
    report = make_report([first_diff, make_diff(4, METRICS, "loss")])
    assert report.verdict == "not exact"
    first, equal, second, hint, *_ = report.lines()
    assert first == f"not exact: first difference at {report.differences[0]}"
    assert str(report.differences[0]).startswith("step 3: `optimizer.pt`, `state.3.exp_avg`, 1 of 4,096 values, ")
    assert equal == "  equal up to step 2; 4 metric values and 3 checkpoint files of 4 steps compared"
    assert second == "  step 4: metric `loss`: 2, expected 1"
    assert "the drill found no state that a resume lost" in hint


def test_a_metric_that_differs_by_itself_does_not_matter() -> None:
    seconds = make_diff(1, METRICS, "seconds")
    report = make_report([seconds], [seconds])
    assert report.is_exact
    assert any("without a kill too" in line and "`seconds`" in line for line in report.lines())


def test_what_differs_by_itself_and_training_does_not_change_does_not_matter() -> None:
    path = make_diff(2, "args.bin", "output_dir", "'/tmp/b', expected '/tmp/a'")
    report = make_report([path], [path], changing=[("m.pt", "w")])
    assert report.is_exact
    assert any("without a kill too" in line and "/tmp/a" in line for line in report.lines())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("optimizer", "  no effect in 4 steps, but not restored: the optimizer, `it` (0, expected 3), after step 3"),
        ("state", ""),
    ],
)
def test_what_is_not_restored_is_said_though_the_runs_are_the_same(kind: str, message: str) -> None:
    records = [ProbeRecord(step, 1, False, float(step), 0.5, 0.0, {f"{kind} it": str(step)}) for step in range(1, 5)]
    resumed = ProbeRecord(3, 2, True, 3.5, 0.5, 0.0, {f"{kind} it": "0"})
    undisturbed, killed = replace(make_run(), records=records), replace(make_run(), records=[*records[:3], resumed])
    report = make_drill_report(PLAN, "drill-0", RunComparison(undisturbed, killed, None, (), (), ()))
    assert report.is_exact
    assert message in "\n".join(report.lines())
    assert ("not restored" in "\n".join(report.lines())) == bool(message)


def test_the_bytes_of_a_killed_upload_that_were_not_sent_again_are_counted() -> None:
    undisturbed = replace(make_run(), saves=[MeasuredSave(2, 900, 900, 0.1), MeasuredSave(4, 900, 700, 0.1)])
    saves = [MeasuredSave(2, 900, 900, 0.1), MeasuredSave(4, 900, 300, 0.1)]
    killed = replace(make_run([Kill("upload", 4, 2, 1.0)]), saves=saves)
    report = make_drill_report(PLAN, "drill-0", RunComparison(undisturbed, killed, None, (), (), ()))
    assert report.kills[0].kept_bytes == 400
    assert any(line.endswith("next step done after 1.0 s, 400 B of the upload kept") for line in report.lines())


@pytest.mark.parametrize(
    ("undisturbed", "kill", "message"),
    [
        (replace(make_run(), manifests={}), Kill("trial", 3, 0, 1.0), "no saved checkpoint"),
        (make_run(), Kill("trial", 1, 0, 1.0), "killed after steps 1; the first checkpoint is at step 2. Kill later"),
    ],
)
def test_a_drill_in_which_nothing_resumes_shows_nothing(undisturbed: DrillRun, kill: Kill, message: str) -> None:
    with pytest.raises(TuneError, match=message):
        require_resume_from_checkpoint(undisturbed, make_run([kill]))
    require_resume_from_checkpoint(make_run(), make_run([kill, Kill("search", 3, 2, 1.0)]))


@pytest.mark.parametrize(
    ("differs", "unstable", "verdict"),
    [
        (make_diff(3, "m.pt", "w"), make_diff(1, METRICS, "seconds"), "not exact"),
        (make_diff(3, "m.pt", "w"), make_diff(2, "m.pt", "w"), "not deterministic"),
        (make_diff(3, "m.pt", "w"), make_diff(2, "m.pt", "v"), "not deterministic"),
        (make_diff(2, "m.pt", "w"), make_diff(4, "m.pt", "v"), "not exact"),
    ],
)
def test_a_training_that_differs_from_itself_proves_nothing(
    differs: Difference, unstable: Difference, verdict: str
) -> None:
    report = make_report([differs], [unstable])
    assert report.verdict == verdict
    assert next(report.lines()).startswith(verdict)


def test_what_is_in_the_checkpoint_is_not_said_to_be_forgotten() -> None:
    records = [ProbeRecord(step, 1, False, float(step), 0.5, 0.0, {"state w": f"{step:016}", "state v": f"{step:016}"})
            for step in range(1, 5)]  # fmt: skip
    resumed = ProbeRecord(3, 2, False, 3.5, 0.5, 0.0, {"state w": "9" * 16, "state v": "8" * 16})
    undisturbed, killed = replace(make_run(), records=records), replace(make_run(), records=[*records[:2], resumed])
    runs = RunComparison(undisturbed, killed, None, [make_diff(3, "s.json", "w.1.0")], (), ())
    report = make_drill_report(PLAN, "drill-0", runs)
    assert [state.name for state in report.unrestored] == ["v"]


def test_bytes_that_cannot_be_read_say_nothing_of_the_training_if_all_metrics_are_equal() -> None:
    detail = FileDifference("m.bin", "", "bytes differ from byte 9 on (12 bytes)", is_byte_comparison=True)
    unread = Difference(3, detail)
    lines = list(make_report([unread]).lines())
    assert lines[0] == f"not exact: first difference at {unread}"
    assert any("Their values may be equal: to compare the values, save arrays, JSON or skops" in line for line in lines)
    assert not any("look for an iterator" in line for line in lines)
    assert any("look for an iterator" in line for line in make_report([unread, make_diff(4, METRICS, "loss")]).lines())


def test_the_report_is_json() -> None:
    fields = json.loads(json.dumps(make_report([make_diff(3, "m.pt", "w")]).fields()))
    detail = {"file": "m.pt", "key": "w", "description": "2, expected 1", "is_byte_comparison": False}
    assert fields["differences"] == [{"step": 3, "detail": detail}]
    assert (fields["verdict"], fields["is_exact"]) == ("not exact", False)


X = DIGESTS[99]
LR, CUDA = "optimizer adam.param_groups.0.lr", "global torch.cuda:1"


def make_record(step: int, states: Mapping[str, str], attempt: int = 1, *, is_restored: bool = False) -> ProbeRecord:
    return ProbeRecord(step, attempt, is_restored, ended_at=float(step), seconds=0.5, wait_seconds=0.1, states=states)


def build_run(*records: ProbeRecord) -> DrillRun:
    return DrillRun({}, {}, [], records, [])


def make_baseline(states: Mapping[str, str]) -> DrillRun:
    """Return a run with these states: `#` is a digest that each step changes, `n` the number of the step."""
    records = []
    for step in range(1, 6):
        texts = {"#": DIGESTS[step], "n": str(step), "n.0": f"{step}.0"}
        records.append(make_record(step, {name: texts.get(text, text) for name, text in states.items()}))
    return build_run(*records)


def resume_after(
    step: int, baseline: DrillRun, changes: Mapping[str, str | None], *, is_restored: bool = True
) -> DrillRun:
    """Return the same run, killed and resumed: `changes` differ after this step; None is a missing state."""
    states = {**baseline.records[step - 1].states, **changes}
    present = {name: text for name, text in states.items() if text is not None}
    return build_run(*baseline.records[:3], make_record(step, present, attempt=2, is_restored=is_restored))


MOMENTS = {"optimizer adam.state.0.step": "n.0", "optimizer adam.state.0.exp_avg": "#"}
TRAINED = {"value loss": "#", "state mean": "#", "state weights": "#", "state other": "#", "state velocity": "#",
           "counter epoch": "#", "counter place": "#", "value lr": "#", "value warm": "#",
           "optimizer adam.m": "#", "optimizer adam.lr": "#", "schedule decay.epoch": "#"}  # fmt: skip
LOSS = {"value loss": "9.5"}  # as the metric


@pytest.mark.parametrize(
    ("states", "changes", "is_restored", "saved", "names"),
    [
        ({"rng random": "#"}, {}, True, [], []),
        ({"rng random": DIGESTS[1]}, {"rng random": X}, True, [], []),
        ({"state batches": "<generator>"}, {"state batches": "<list>"}, True, [], []),
        # generators first, and one line of each object: a counter if there is one
        ({"model weights": "#", "rng random": "#", "optimizer adam.step": "#", "optimizer adam.mean": "#"},
         {"model weights": "ff", "optimizer adam.mean": X, "optimizer adam.step": "0", "rng random": "ee"}, True, [],
         ["rng random", "optimizer adam.step", "model weights"]),
        # the rate of the one optimizer follows from its schedule
        ({"schedule cos.epoch": "#", "optimizer adam.lr": "#"}, {"schedule cos.epoch": "0", "optimizer adam.lr": "0.1"},
         True, [], ["schedule cos.epoch"]),
        ({"schedule cos.epoch": "#", "optimizer adam.lr": "#", "optimizer adam.m": "#"},
         {"schedule cos.epoch": "0", "optimizer adam.lr": "0.1", "optimizer adam.m": X}, True, [],
         ["schedule cos.epoch", "optimizer adam.m"]),
        ({"schedule cos.epoch": "#", "optimizer gen.lr": "#", "optimizer critic.lr": "#"},
         {"schedule cos.epoch": "0", "optimizer critic.lr": "0.1"}, True, [],
         ["schedule cos.epoch", "optimizer critic.lr"]),
        # one step after the resume: what follows from a cause is not named
        (TRAINED, {"counter place": "32", "optimizer adam.m": X, "value loss": "9.4"}, False, [], ["counter place"]),
        (TRAINED, {"optimizer adam.lr": "0.009", "schedule decay.epoch": "1", "value loss": "9.4"}, False, [],
         ["schedule decay.epoch"]),
        (TRAINED, {"optimizer adam.m": X, "value loss": "9.4"}, False, [], ["optimizer adam.m", "value loss"]),
        # nor is what is in the checkpoint, unless nothing else differs
        (TRAINED, {"state weights": X, "state velocity": X}, False, [], ["state weights", "state velocity"]),
        (TRAINED, {"state weights": X, "state velocity": X}, False, ["weights"], ["state velocity"]),
        (TRAINED, {"state weights": X, "state velocity": X}, False, ["weights", "velocity"],
         ["state weights", "state velocity"]),
        (TRAINED, {"state weights": X, "state velocity": X}, True, ["weights"], ["state weights", "state velocity"]),
        # a variable that holds a metric may be a cause if no other is left
        (TRAINED, {**LOSS, "state mean": "9.5", "counter epoch": "1"}, False, ["weights"], ["counter epoch"]),
        (TRAINED, {**LOSS, "state mean": "9.5"}, False, ["weights"], ["metric loss", "metric mean"]),
        (TRAINED, {"value lr": "9.5", "state weights": X}, False, ["weights"], ["metric lr"]),
        (TRAINED, {**LOSS, "state other": X}, False, ["weights"], ["state other"]),
        (TRAINED, {"value warm": "False", "state weights": X}, False, ["weights"], ["value warm"]),
        # a new optimizer lacks its moments; one that is gone is no evidence
        ({LR: "0.001", **MOMENTS}, dict.fromkeys(MOMENTS), True, [], ["optimizer adam.state.0.step"]),
        ({LR: "0.001", **MOMENTS}, dict.fromkeys([LR, *MOMENTS]), True, [], []),
    ],
)  # fmt: skip
def test_what_was_not_restored_is_named_and_not_what_follows_from_it(
    states: Mapping[str, str], changes: Mapping[str, str | None], is_restored: bool, saved: list[str], names: list[str]
) -> None:
    baseline = make_baseline(states)
    killed = resume_after(3 if is_restored else 4, baseline, changes, is_restored=is_restored)
    killed = replace(killed, metrics={4: {"loss": 9.5, "epoch": 1, "done": False}})
    unrestored = find_unrestored_states(baseline, killed, saved=saved)
    assert [f"{state.kind} {state.name}" for state in unrestored] == names


@pytest.mark.parametrize(
    ("name", "before", "after", "message"),
    [
        ("global random", "#", X, "Python's generator, after step 3: save random.getstate(), and set it on a resume"),
        ("global numpy.random", "#", X,
         "NumPy's global generator, after step 3: save numpy.random.get_state(), and set it on a resume"),
        ("global torch", "#", X,
         "torch's generator of the CPU, after step 3: save torch.get_rng_state(), and set it on a resume"),
        (CUDA, "#", X,
         "torch's generator of cuda:1, after step 3: save torch.cuda.get_rng_state_all(), and set it on a resume"),
        ("rng draws", "#", repr(X), "the state of a random generator, `draws`, after step 3: save and load it"),
        ("optimizer adam.mean", "#", X, "the optimizer, `adam.mean`, after step 3: save and load it"),
        ("optimizer adam.mean", "#", None, "the optimizer, `adam.mean` (absent), after step 3: save and load it"),
        ("schedule cos.epoch", "#", X, "the learning-rate schedule, `cos.epoch`, after step 3: save and load it"),
        ("counter steps", "n", "0", "a counter, `steps` (0, expected 3), after step 3: save and load it"),
        ("data batches", "n", "0", ("the place in the data, `batches` (0, expected 3), after step 3: "
          "save the order and the position, or use ResumableLoader")),
    ],
)  # fmt: skip
def test_each_kind_is_said_with_what_to_save(name: str, before: str, after: str | None, message: str) -> None:
    baseline = make_baseline({name: before, "optimizer adam.lr": "0.1"})
    (unrestored,) = find_unrestored_states(baseline, resume_after(3, baseline, {name: after}))
    assert str(unrestored) == message


def test_what_does_not_change_at_each_step_is_evidence() -> None:
    scales = enumerate(("1024", "1024", "2048", "2048", "2048"), 1)
    baseline = build_run(*(make_record(step, {"scaler s.scale": scale}) for step, scale in scales))
    (unrestored,) = find_unrestored_states(baseline, resume_after(4, baseline, {"scaler s.scale": "1024"}))
    assert (unrestored.name, unrestored.actual, unrestored.expected) == ("s.scale", "1024", "2048")


def test_a_resume_after_the_runs_have_differed_says_nothing_of_what_was_restored() -> None:
    baseline = make_baseline({"model weights": "#"})
    first = resume_after(3, baseline, {}).records[-1]
    second = replace(resume_after(5, baseline, {"model weights": X}).records[-1], attempt=3)
    killed = build_run(*baseline.records[:3], first, *baseline.records[3:], second)
    assert [state.name for state in find_unrestored_states(baseline, killed)] == ["weights"]
    assert find_unrestored_states(baseline, killed, differs_at=5) == []
    assert [state.name for state in find_unrestored_states(baseline, killed, differs_at=6)] == ["weights"]


def test_what_differs_without_a_kill_is_evidence_only_if_it_does_so_later() -> None:
    baseline = make_baseline({"rng random": "#", "rng other": "#"})
    killed = resume_after(3, baseline, {"rng random": X})
    differ = [make_record(record.step, {"rng random": DIGESTS[50]}) for record in baseline.records]
    later, always = build_run(*baseline.records[:4], differ[4]), build_run(*differ)
    assert [state.name for state in find_unrestored_states(baseline, killed, later)] == ["random"]
    assert find_unrestored_states(baseline, killed, always) == []
    killed = resume_after(3, baseline, {"rng random": X, "rng other": X})
    states = [{**record.states, "rng random": DIGESTS[50 + record.step]} for record in baseline.records[:3]]
    killed = build_run(*map(make_record, (1, 2, 3), states), killed.records[-1])
    assert [state.name for state in find_unrestored_states(baseline, killed)] == ["other"]


def test_nothing_to_compare_after_the_resume_is_no_exact_run() -> None:
    loss = make_diff(1, METRICS, "loss")
    runs = RunComparison(make_run(), make_run([Kill("trial", 3, 2, 1.0)]), None, [loss], [loss], ())
    with pytest.raises(TuneError, match="nothing to compare after the resume: all metrics differ without a kill"):
        make_drill_report(PLAN, "drill-0", runs)
    later = replace(make_run(), manifests={2: MANIFEST, 4: CHANGED})
    killed = replace(later, records=[*later.records[:3], ProbeRecord(2, 2, True, 3.5, 0.5, 0.0, {})])
    report = make_drill_report(PLAN, "drill-0", RunComparison(later, killed, None, [loss], [loss], [("m.pt", "w")]))
    assert (report.is_exact, report.compared_metric_count) == (True, 0)
    report = make_drill_report(PLAN, "drill-0", RunComparison(later, killed, None, [loss], [loss], ()))
    assert report.verdict == "not deterministic", "no checkpoint holds a result"


def test_runs_in_which_nothing_changes_are_not_exact() -> None:
    metrics = {step: {"loss": 0.5} for step in range(1, 5)}
    same = replace(make_run(), metrics=metrics, manifests={2: MANIFEST, 4: MANIFEST})
    with pytest.raises(TuneError, match="nothing to compare: no metric and no checkpoint changes from step to step"):
        make_drill_report(PLAN, "drill-0", RunComparison(same, same, None, (), (), ()))
    changed = replace(same, manifests={2: MANIFEST, 4: CHANGED})
    assert make_drill_report(PLAN, "drill-0", RunComparison(changed, changed, None, (), (), ())).is_exact


DRAWN: Mapping[str, Sequence[float]] = {
    "loss": [1.7, 1.2, 1.9, 1.4],
    "epoch": [1, 2, 3, 4],
    "fraction": [0.1, 0.2, 0.3, 0.4],
    "rate": [0.09, 0.081, 0.0729, 0.06561],
    "constant": [0.5] * 4,
    "seconds": [0.01, 0.02, 0.01, 0.03],
    "now": [1.8e9 + step for step in range(1, 5)],
    "elapsed": [7.1 + step for step in range(1, 5)],
}


def make_metrics_run(*names: str) -> DrillRun:
    """Return a run with these metrics, steps of half a second, and a checkpoint that changes."""
    metrics = {step: {name: DRAWN[name][step - 1] for name in names} for step in range(1, 5)}
    records = [ProbeRecord(step, 1, False, 1.8e9 + step, 0.5, 0.0, {"rng r": DIGESTS[step]}) for step in range(1, 5)]
    return DrillRun(metrics, {2: MANIFEST, 4: CHANGED}, [], records, [])


def resume_run(baseline: DrillRun) -> DrillRun:
    return replace(baseline, records=[*baseline.records[:3], replace(baseline.records[2], attempt=2, is_restored=True)])


GENERATOR = Difference(1, FileDifference(GENERATORS, "r", "another state"))


@pytest.mark.parametrize(
    ("metrics", "differ", "results", "generators", "verdict"),
    [
        (["loss", "epoch"], ["loss"], [], [], "not deterministic"),
        (["loss", "epoch", "constant"], ["loss"], [], [GENERATOR], "not deterministic"),
        (["loss", "rate"], ["loss"], [], [], "not deterministic"),
        (["loss", "fraction"], ["loss"], [], [], "not deterministic"),
        (["loss", "rate"], ["loss"], [("m.pt", "w")], [], "exact"),
        (["loss", "rate"], ["loss"], [("m.pt", "w")], [GENERATOR], "not deterministic"),
        (["epoch", "constant"], [], [], [GENERATOR], "not deterministic"),
        (["epoch", "constant"], [], [], [], "exact"),
        (["loss"], [], [], [GENERATOR], "exact"),
        (["loss", "seconds"], ["seconds"], [], [], "exact"),
        (["loss", "now"], ["now"], [], [], "exact"),
        (["loss", "elapsed"], ["elapsed"], [], [], "exact"),
        (["loss", "seconds"], ["seconds"], [], [GENERATOR], "exact"),
        (["epoch", "seconds"], ["seconds"], [], [], "not deterministic"),
        (["epoch", "seconds"], ["seconds"], [("m.pt", "w")], [], "exact"),
    ],
)
def test_what_is_the_same_in_any_training_shows_nothing(
    metrics: list[str], differ: list[str], results: list[tuple[str, str]], generators: list[Difference], verdict: str
) -> None:
    """`results` are locations in checkpoints that training changes and that do not differ."""
    undisturbed = make_metrics_run(*metrics)
    unstable = [make_diff(1, METRICS, name) for name in differ]
    runs = RunComparison(undisturbed, resume_run(undisturbed), None, unstable, unstable, results, generators)
    report = make_drill_report(PLAN, "drill-0", runs)
    assert report.verdict == verdict, list(report.lines())
    assert report.is_inconclusive == (verdict != "exact")
    if verdict != "exact":
        first = generators[0] if generators else unstable[0]
        assert next(report.lines()).startswith(f"not deterministic: two runs differ without a kill, at {first}. ")


def test_a_checkpoint_that_only_one_run_has_is_a_difference() -> None:
    undisturbed = make_metrics_run("loss")
    missing = Difference(4, FileDifference(CHECKPOINTS, "", "no checkpoint, expected one"))
    killed = replace(resume_run(undisturbed), manifests={2: MANIFEST})
    for unstable in ([], [missing]):  # though two undisturbed runs save at other steps, one is due after the resume
        report = make_drill_report(PLAN, "drill-0", RunComparison(undisturbed, killed, None, [missing], unstable, ()))
        assert report.verdict == "not exact"
        assert next(report.lines()) == "not exact: first difference at step 4: no checkpoint, expected one"
        assert any("save a checkpoint at the same steps after a resume" in line for line in report.lines())


def test_a_restart_that_was_not_planned_disturbs_a_run_too() -> None:
    first = make_run().records
    assert make_run().undisturbed_steps == 4
    for resumed, steps in (
        (ProbeRecord(2, 2, True, 3.5, 0.5, 0.0, {}), 2), (ProbeRecord(3, 2, False, 3.5, 0.5, 0.0, {}), 2),
        (ProbeRecord(1, 2, False, 3.5, 0.5, 0.0, {}), 0),
    ):  # fmt: skip
        assert replace(make_run(), records=[*first[:3], resumed, *first[2:]]).undisturbed_steps == steps


def compute_slowdown(interval: float, save: float, mean: float) -> float:
    """Return the wall-clock time per second of training, without restarts: Daly (2006), equation 13."""
    return mean * (exp((interval + save) / mean) - 1) / interval


@pytest.mark.parametrize("mean", [3600.0, 86_400.0])
@pytest.mark.parametrize("save", [0.1, 10.0, 300.0])
def test_no_other_interval_is_better_by_more_than_a_thousandth(save: float, mean: float) -> None:
    actual = compute_slowdown(compute_optimal_interval(save, mean), save, mean)
    best = min(compute_slowdown(1.05**power, save, mean) for power in range(-50, 300))
    assert actual <= best * 1.001
