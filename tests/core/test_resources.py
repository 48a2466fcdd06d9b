"""Allocating a machine's resources: whole GPUs are never shared, and impossible requests are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.resources import Machine, Resources, divide_into_slots, parse_resources

BOX = Machine(cpu_count=8, gpus=("0", "1", "2", "3"))


@pytest.mark.parametrize(
    ("needed", "at_most", "slots"),
    [
        (Resources(cpu=2), None, [()] * 4),
        (Resources(cpu=0.5), None, [()] * 16),
        (Resources(cpu=3), None, [()] * 2),
        (Resources(cpu=1, gpu=1), None, [("0",), ("1",), ("2",), ("3",)]),
        (Resources(cpu=4, gpu=1), None, [("0",), ("1",)]),
        (Resources(cpu=1, gpu=2), None, [("0", "1"), ("2", "3")]),
        (Resources(cpu=1, gpu=3), None, [("0", "1", "2")]),
        (Resources(cpu=1, gpu=0.5), 6, [("0",), ("1",), ("2",), ("3",), ("0",), ("1",)]),
        (Resources(cpu=0, gpu=0.4), None, [("0",), ("1",), ("2",), ("3",)] * 2),
        (Resources(cpu=0, gpu=1 / 3), None, [("0",), ("1",), ("2",), ("3",)] * 3),
        (Resources(cpu=0), 20, [()] * 20),
        (Resources(cpu=0), None, [()] * 8),
    ],
)
def test_there_are_as_many_slots_as_trials_that_can_train_at_once(
    needed: Resources, at_most: int | None, slots: list[tuple[str, ...]]
) -> None:
    assert list(divide_into_slots(BOX, needed, at_most)) == slots


@given(st.integers(1, 9), st.lists(st.integers(0, 30), max_size=9, unique=True), st.integers(1, 4), st.integers(1, 3))
def test_no_gpu_is_in_two_slots(cpus: int, gpus: list[int], cpu: int, gpu: int) -> None:
    machine = Machine(cpus, tuple(map(str, gpus)))
    if cpu > cpus or gpu > len(gpus):
        with pytest.raises(InvalidInput, match="but this process may use"):
            divide_into_slots(machine, Resources(cpu=cpu, gpu=gpu), None)
        return
    slots = divide_into_slots(machine, Resources(cpu=cpu, gpu=gpu), None)
    gpu_ids = [gpu_id for slot in slots for gpu_id in slot]
    assert len(gpu_ids) == len(set(gpu_ids)) == gpu * len(slots)
    assert len(slots) * cpu <= cpus


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"GPU": 1}, "expected 'cpu' or 'gpu', found 'GPU'; did you mean 'gpu'"),
        ({"memory": 1}, "expected 'cpu' or 'gpu', found 'memory'"),
        ({"cpu": -1}, "cpu: expected a number of at least 0, found -1"),
        ({"cpu": True}, "cpu: expected a number"),
        ({"cpu": float("nan")}, "cpu: expected a number"),
        ({"gpu": "1"}, "gpu: expected a number"),
        ({"gpu": 1.5}, "gpu: expected a whole number, or a fraction below 1, found 1.5"),
    ],
)
def test_what_cannot_be_needed_is_said(resources: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"^here: {message}"):
        parse_resources(resources, "here")


def test_a_cpu_that_is_not_named_is_one_and_a_gpu_none() -> None:
    assert parse_resources({"gpu": 0.5}, "here") == Resources(cpu=1, gpu=0.5)
    assert parse_resources({"cpu": 2}, "here") == Resources(cpu=2, gpu=0)
