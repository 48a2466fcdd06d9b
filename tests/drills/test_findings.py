"""The verdict of a drill, and its sentences."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest

from prefect_tune.core.checkpoints.manifest import About, FileRef, Manifest
from prefect_tune.core.errors import TuneError
from prefect_tune.drills.evidence import METRICS, Difference, DrillRun, Kill, Record, Save
from prefect_tune.drills.file_contents import FileDifference
from prefect_tune.drills.findings import DrillReport, Runs, report_of
from prefect_tune.drills.plan import DrillPlan
from prefect_tune.drills.run_drill import require_resumed

PLAN = DrillPlan("my.module:Net", steps=4, save_every=2, kills=((3, "trial"),))
MANIFEST = Manifest(
    experiment="e",
    generation=1,
    trial="trial",
    step=2,
    sequence=1,
    about=About(attempt=1, term=1, write_id="w", created_at=""),
    blobs=(),
    files=tuple(FileRef(path=name, size_bytes=0) for name in "abc"),
)


def run(kills: Sequence[Kill] = ()) -> DrillRun:
    records = [Record(step, 1, False, float(step), 0.5, 0.2 if step == 3 else 0.0, {}) for step in range(1, 5)]
    metrics = {step: {"loss": 1 / step} for step in range(1, 5)}
    return DrillRun(metrics, {2: MANIFEST}, [Save(2, 2048, 512, 0.1)], records, kills)


def reported(
    differences: Sequence[Difference] = (),
    unstable: Sequence[Difference] = (),
    changing: Collection[tuple[str, str]] = (("m.pt", "w"), ("m.pt", "v")),
) -> DrillReport:
    killed = run([Kill("trial", 3, 2, 4.2)])
    again = run() if differences else None
    return report_of(PLAN, "drill-0", Runs(run(), killed, again, differences, unstable, changing))


def at(step: int, file: str, key: str, what: str = "2, expected 1") -> Difference:
    return Difference(step, FileDifference(file, key, what))


def test_runs_that_are_the_same_are_exact_and_the_costs_are_said() -> None:
    found = reported()
    assert (found.verdict, found.is_exact) == ("exact", True)
    assert list(found.lines()) == [
        "exact: the run that was killed 1 time is the same; 4 metric values and 3 checkpoint files of 4 steps compared",
        "  kill of the trial after step 3: resumed from step 2, trained 1 step again, next step done after 4.2 s",
        "  a save: 2 KiB, 512 B of it sent, in 0.10 s; training waits 0.20 s",
        "  with a failure every 24 h: save every 186 s (372 steps), which loses the least time, 0.2%",
    ]


def test_the_first_difference_is_named_and_up_to_where_the_runs_are_equal() -> None:
    found = reported(
        [at(3, "optimizer.pt", "state.3.exp_avg", "1 of 4,096 values, max |Δ| 2e-09"), at(4, METRICS, "loss")]
    )
    assert found.verdict == "not exact"
    first, equal, second, hint, *_ = found.lines()
    assert first == f"not exact: first difference at {found.differences[0]}"
    assert str(found.differences[0]).startswith("step 3: `optimizer.pt`, `state.3.exp_avg`, 1 of 4,096 values, ")
    assert equal == "  equal up to step 2; 4 metric values and 3 checkpoint files of 4 steps compared"
    assert second == "  step 4: metric `loss`: 2, expected 1"
    assert "nothing that the drill can see was left out" in hint


def test_a_metric_that_differs_by_itself_does_not_matter() -> None:
    seconds = at(1, METRICS, "seconds")
    found = reported([seconds], [seconds])
    assert found.is_exact
    assert any("a second undisturbed run too" in line and "`seconds`" in line for line in found.lines())


def test_what_differs_by_itself_and_training_does_not_change_does_not_matter() -> None:
    path = at(2, "args.bin", "output_dir", "'/tmp/b', expected '/tmp/a'")
    found = reported([path], [path], changing=[("m.pt", "w")])
    assert found.is_exact
    assert any("a second undisturbed run too" in line and "/tmp/a" in line for line in found.lines())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("optimizer", "  no effect in 4 steps, but not restored: the optimizer, `it` (0, expected 3), after step 3"),
        ("state", ""),
    ],
)
def test_what_is_not_restored_is_said_though_the_runs_are_the_same(kind: str, said: str) -> None:
    like = [Record(step, 1, False, float(step), 0.5, 0.0, {f"{kind} it": str(step)}) for step in range(1, 5)]
    resumed = Record(3, 2, True, 3.5, 0.5, 0.0, {f"{kind} it": "0"})
    undisturbed, killed = replace(run(), records=like), replace(run(), records=[*like[:3], resumed])
    found = report_of(PLAN, "drill-0", Runs(undisturbed, killed, None, (), (), ()))
    assert found.is_exact
    assert said in "\n".join(found.lines())
    assert ("not restored" in "\n".join(found.lines())) == bool(said)


def test_the_bytes_of_a_killed_upload_that_were_not_sent_again_are_counted() -> None:
    undisturbed = replace(run(), saves=[Save(2, 900, 900, 0.1), Save(4, 900, 700, 0.1)])
    killed = replace(run([Kill("upload", 4, 2, 1.0)]), saves=[Save(2, 900, 900, 0.1), Save(4, 900, 300, 0.1)])
    found = report_of(PLAN, "drill-0", Runs(undisturbed, killed, None, (), (), ()))
    assert found.kills[0].kept_bytes == 400
    assert any(line.endswith("next step done after 1.0 s, 400 B of the upload kept") for line in found.lines())


@pytest.mark.parametrize(
    ("undisturbed", "kill", "said"),
    [
        (replace(run(), manifests={}), Kill("trial", 3, 0, 1.0), "the training saved no checkpoint"),
        (run(), Kill("trial", 1, 0, 1.0), "killed after these steps: 1; the first checkpoint is of step 2. Kill after"),
    ],
)
def test_a_drill_in_which_nothing_resumes_shows_nothing(undisturbed: DrillRun, kill: Kill, said: str) -> None:
    with pytest.raises(TuneError, match=said):
        require_resumed(undisturbed, run([kill]))
    require_resumed(run(), run([kill, Kill("search", 3, 2, 1.0)]))


@pytest.mark.parametrize(
    ("differs", "unstable", "verdict"),
    [
        (at(3, "m.pt", "w"), at(1, METRICS, "seconds"), "not exact"),
        (at(3, "m.pt", "w"), at(2, "m.pt", "w"), "not deterministic"),
        (at(3, "m.pt", "w"), at(2, "m.pt", "v"), "not deterministic"),
        (at(2, "m.pt", "w"), at(4, "m.pt", "v"), "not exact"),
    ],
)
def test_a_training_that_differs_from_itself_proves_nothing(
    differs: Difference, unstable: Difference, verdict: str
) -> None:
    found = reported([differs], [unstable])
    assert found.verdict == verdict
    assert next(found.lines()).startswith(verdict)


def test_what_is_too_much_to_list_is_counted() -> None:
    lines = list(reported([at(3, "m.pt", f"w{index}") for index in range(20)]).lines())
    assert "  … and 11 more" in lines


def test_the_values_of_one_list_are_one_line() -> None:
    values = [at(3 + row, "s.json", f"weights.{row}.{column}") for row in range(2) for column in range(9)]
    first, _, second, third, *_ = reported([*values, at(4, "s.json", "state.0.mean"), at(4, "l.json", "1.2")]).lines()
    assert first == (
        "not exact: first difference at step 3: `s.json`, `weights.0.0`, 2, expected 1; the first of 18 values of "
        "`weights`"
    )
    assert (second, third) == (
        "  step 4: `s.json`, `state.0.mean`, 2, expected 1", "  step 4: `l.json`, `1.2`, 2, expected 1"
    )  # fmt: skip


def test_what_is_in_the_checkpoint_is_not_said_to_be_forgotten() -> None:
    like = [Record(step, 1, False, float(step), 0.5, 0.0, {"state w": f"{step:016}", "state v": f"{step:016}"})
            for step in range(1, 5)]  # fmt: skip
    resumed = Record(3, 2, False, 3.5, 0.5, 0.0, {"state w": "9" * 16, "state v": "8" * 16})
    undisturbed, killed = replace(run(), records=like), replace(run(), records=[*like[:2], resumed])
    found = report_of(PLAN, "drill-0", Runs(undisturbed, killed, None, [at(3, "s.json", "w.1.0")], (), ()))
    assert [each.name for each in found.forgotten] == ["v"]


def test_bytes_that_cannot_be_read_say_nothing_of_the_training_if_all_metrics_are_equal() -> None:
    unread = Difference(3, FileDifference("m.bin", "", "bytes differ from byte 9 on (12 bytes)", is_of_bytes=True))
    lines = list(reported([unread]).lines())
    assert lines[0] == f"not exact: first difference at {unread}"
    assert any("the values in them may be equal: to compare them, save arrays, JSON or skops" in each for each in lines)
    assert not any("look for an iterator" in each for each in lines)
    assert any("look for an iterator" in each for each in reported([unread, at(4, METRICS, "loss")]).lines())


def test_the_report_is_json() -> None:
    found = json.loads(json.dumps(reported([at(3, "m.pt", "w")]).fields()))
    what = {"file": "m.pt", "key": "w", "what": "2, expected 1", "is_of_bytes": False}
    assert found["differences"] == [{"step": 3, "what": what}]
    assert (found["verdict"], found["is_exact"]) == ("not exact", False)


def test_a_kill_that_was_not_made_is_said() -> None:
    found = report_of(PLAN, "drill-0", Runs(run(), run(), None, (), (), ()))
    assert found.missed_kills == 1
    assert any("1 kill was not made" in line for line in found.lines())
