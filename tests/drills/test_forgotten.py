"""What a resumed run has probably not restored, by the states of its first step after the resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from prefect_tune.drills.evidence import DrillRun, Record
from prefect_tune.drills.findings import forgotten_in

DIGESTS = [f"{number:016x}" for number in range(100)]


def record(step: int, states: Mapping[str, str], attempt: int = 1, *, is_restored: bool = False) -> Record:
    return Record(step, attempt, is_restored, at=float(step), seconds=0.5, waited=0.1, states=states)


def run(*records: Record) -> DrillRun:
    return DrillRun({}, {}, [], records, [])


def undisturbed(**names: str) -> DrillRun:
    """A run in which each of these states changes at each step, and `fixed` never does."""
    states = {f"{kind} {name.replace('__', '.')}": kind for name, kind in names.items()}
    return run(
        *(record(step, dict.fromkeys(states, f"{DIGESTS[step]}") | {"state fixed": "0"}) for step in range(1, 6))
    )


def resumed_at(step: int, like: DrillRun, **changes: str) -> DrillRun:
    states = dict(next(each.states for each in like.records if each.step == step))
    states |= {name: value for name, value in changes.items() if name in states}
    return run(*like.records[:step], record(step, states, attempt=2, is_restored=True))


def test_what_is_as_it_was_is_not_named() -> None:
    like = undisturbed(random="rng")
    assert forgotten_in(like, resumed_at(3, like)) == []


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("global", "random", "Python's generator: save random.getstate()"),
        ("global", "numpy.random", "NumPy's global generator: save numpy.random.get_state()"),
        ("global", "torch", "torch's generator of the CPU: save torch.get_rng_state()"),
        ("global", "torch.cuda:1", "torch's generator of cuda:1: save torch.cuda.get_rng_state_all()"),
        ("rng", "draws", "the state of a random generator, `draws`: save and load it"),
        ("optimizer", "adam.state.0.exp_avg", "the optimizer, `adam.state.0.exp_avg`: save and load it"),
        ("schedule", "cosine.last_epoch", "the learning-rate schedule, `cosine.last_epoch`: save and load it"),
    ],
)  # fmt: skip
def test_each_kind_is_said_with_what_to_save(kind: str, name: str, said: str) -> None:
    like = undisturbed(**{name.replace(".", "__"): kind})
    (found,) = forgotten_in(like, resumed_at(3, like, **{f"{kind} {name}": DIGESTS[99]}))
    assert str(found).replace(", and set it on a resume", "").replace(", after step 3", "") == said


def test_the_digest_of_a_generator_is_not_shown() -> None:
    like = undisturbed(random="rng")
    (found,) = forgotten_in(like, resumed_at(3, like, **{"rng random": repr(DIGESTS[99])}))
    assert str(found) == "the state of a random generator, `random`, after step 3: save and load it"


def test_a_counter_is_said_with_both_values() -> None:
    like = run(*(record(step, {"counter steps": str(step)}) for step in range(1, 6)))
    (found,) = forgotten_in(like, resumed_at(3, like, **{"counter steps": "0"}))
    assert str(found) == "a counter, `steps` (0, expected 3), after step 3: save and load it"


def test_generators_come_first_and_one_line_of_each_object_which_is_a_counter_if_there_is_one() -> None:
    like = undisturbed(weights="model", random="rng", adam__step="optimizer", adam__mean="optimizer")
    changed = {
        "model weights": "ff",
        "optimizer adam.mean": DIGESTS[98],
        "optimizer adam.step": "0",
        "rng random": "ee",
    }
    found = forgotten_in(like, resumed_at(3, like, **changed))
    assert [(each.kind, each.name) for each in found] == [
        ("rng", "random"), ("optimizer", "adam.step"), ("model", "weights"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ({"counter place": "32", "optimizer adam.m": DIGESTS[97], "value loss": "9.4"}, ["place"]),
        ({"optimizer adam.lr": "0.009", "schedule decay.epoch": "1", "value loss": "9.4"}, ["decay.epoch", "adam.lr"]),
        ({"optimizer adam.m": DIGESTS[97], "value loss": "9.4"}, ["adam.m", "loss"]),
    ],
)
def test_one_step_after_the_resume_what_follows_from_a_cause_is_not_named(
    differs: Mapping[str, str], named: Sequence[str]
) -> None:
    like = run(*(record(step, dict.fromkeys(differs, DIGESTS[step])) for step in range(1, 6)))
    killed = run(*like.records[:3], record(4, differs, attempt=2))
    assert [each.name for each in forgotten_in(like, killed)] == named


def test_a_generator_that_training_does_not_use_is_no_evidence() -> None:
    like = run(*(record(step, {"rng numpy.random": DIGESTS[1]}) for step in range(1, 6)))
    assert forgotten_in(like, resumed_at(3, like, **{"rng numpy.random": DIGESTS[9]})) == []


def test_what_does_not_change_at_each_step_is_evidence() -> None:
    like = run(*(record(step, {"scaler scaler.scale": "1024" if step < 3 else "2048"}) for step in range(1, 6)))
    (found,) = forgotten_in(like, resumed_at(4, like, **{"scaler scaler.scale": "1024"}))
    assert (found.name, found.found, found.expected) == ("scaler.scale", "1024", "2048")


def test_what_two_undisturbed_runs_do_not_share_is_no_evidence() -> None:
    like, again = undisturbed(random="rng"), undisturbed(random="rng")
    for each in again.records:
        each.states["rng random"] = DIGESTS[50 + each.step]  # type: ignore[index]  # a dict of this test
    killed = resumed_at(3, like, **{"rng random": DIGESTS[99]})
    assert forgotten_in(like, killed, again) == []
    assert forgotten_in(like, killed, like) != []


def test_what_has_no_digest_is_no_evidence() -> None:
    like = run(*(record(step, {"state batches": "<generator>"}) for step in range(1, 6)))
    assert forgotten_in(like, resumed_at(3, like, **{"state batches": "<list>"})) == []


def test_a_local_variable_that_is_in_the_checkpoint_is_named_only_if_nothing_else_differs() -> None:
    differs = {"state weights": DIGESTS[97], "state velocity": DIGESTS[98]}
    like = run(*(record(step, dict.fromkeys(differs, DIGESTS[step])) for step in range(1, 6)))
    killed = run(*like.records[:3], record(4, differs, attempt=2))
    assert [each.name for each in forgotten_in(like, killed)] == ["weights", "velocity"]
    (found,) = forgotten_in(like, killed, saved=["weights"])
    assert str(found) == "a local variable, `velocity`, after step 3: save and load it"
    assert len(forgotten_in(like, killed, saved=["weights", "velocity"])) == 2
    restored = run(*like.records[:3], record(4, differs, attempt=2, is_restored=True))
    assert [each.name for each in forgotten_in(like, restored, saved=["weights"])] == ["weights", "velocity"]
    assert str(forgotten_in(like, restored)[0]) == "an attribute, `weights`, after step 4: save and load it"
