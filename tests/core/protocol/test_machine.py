"""A state machine of one trial, compared with a model that shares no code with the package."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefect_tune.core.checkpoints.commit import verify_range
from prefect_tune.core.checkpoints.manifest import Manifest, plan_reads
from prefect_tune.core.errors import CheckpointCorrupt, CheckpointNotFound, Superseded
from prefect_tune.core.experiment import experiment as folding
from prefect_tune.core.experiment import trial_transitions as trials
from prefect_tune.core.journal_events import (
    AnyTrialEvent,
    AttemptEnded,
    Cause,
    CheckpointsRetired,
    ExperimentForked,
    ForkedTrial,
    Writer,
)
from prefect_tune.core.restore import read_manifest
from prefect_tune.core.storage.layout import CheckpointKey
from tests.core.driver import KEY, Files, Session, Witness, find_unreachable
from tests.core.happenings import NEXT_STATUS, make_event
from tests.core.histories import small_blobs
from tests.core.protocol.family import NAMES, Family
from tests.fakes.stores.dying_store import Crash, DyingStore, Failure
from tests.fakes.stores.memory_files import load_files
from tests.fakes.stores.memory_store import MemoryStore
from tests.long_cases import deep_count

Save = tuple[int, int]
"""Step and sequence."""


@dataclass
class Model:
    """The expected state, in plain values."""

    live: list[Save] = field(default_factory=list)
    files: dict[Save, list[Files]] = field(default_factory=dict)
    unsure: Save | None = None
    """An interrupted save: the next owner decides whether it counts."""
    damaged: set[str] = field(default_factory=set)
    saves_since: Counter[str] = field(default_factory=Counter)
    """The number of saves since a blob was damaged."""
    step: int = 0
    status: str = "pending"

    def last_two(self) -> list[Save]:
        return self.live[-2:]


class Trial(RuleBasedStateMachine):
    """One experiment, its present owner if any, and superseded owners that still run."""

    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore()
        self.witness = Witness()
        self.model = Model()
        self.owner: Session | None = None
        self.zombies: list[Session] = []
        self.small_blobs_patch = small_blobs()
        self.small_blobs_patch.__enter__()

    def teardown(self) -> None:
        self.small_blobs_patch.__exit__(None, None, None)

    # -------------------------------------------------------------------------------- takeovers and crashes

    @initialize()
    def start(self) -> None:
        self.start_elsewhere()

    @rule()
    def start_elsewhere(self) -> None:
        """Open the experiment by a new owner, while the present one runs or after it died."""
        if self.owner:
            self.zombies.append(self.owner)
        self.owner = Session(self.store, self.witness, owner=f"owner {self.witness.stamps}")
        self.owner.open()
        if self.model.status == "running":
            self.model.status = "pending"
        self._check_adoption()

    @rule()
    def go_on(self) -> None:
        """Start or continue training from any status."""
        self._ensure_running()

    def _check_adoption(self) -> None:
        """Check that the new owner found one of the two or three allowed states."""
        assert self.owner
        saves = [(ref.step, ref.sequence) for ref in self.owner.trial.checkpoints]
        before = self.model.live
        if (unsure := self.model.unsure) is not None:
            self.model.live = [*before, unsure]
            allowed = [before, self.model.live, self.model.last_two()]
        else:
            allowed = [before]
        assert any(self._is_allowed(saves, saves_allowed) for saves_allowed in allowed)
        self.model.live, self.model.unsure = saves, None
        for save in saves:  # an adopted save: its owner died before it recorded the save
            if save not in self.witness.published:
                self.witness.published[save] = self._manifest(save).blob_paths()

    def _is_allowed(self, saves: list[Save], allowed: list[Save]) -> bool:
        """Whether `found` is `allowed`, without some or none of the damaged checkpoints."""
        missing = [save for save in allowed if save not in saves]
        published = self.witness.published
        return [save for save in allowed if save in saves] == saves and all(
            published[save] & self.model.damaged for save in missing
        )

    @rule()
    def crash(self) -> None:
        self.owner = None

    def _ensure_owner(self) -> Session:
        """Return the owner; replace a dead owner first."""
        if self.owner is None:
            self.start_elsewhere()
        assert self.owner
        return self.owner

    def _ensure_running(self) -> Session:
        """Return the owner, with a running trial."""
        owner = self._ensure_owner()
        if self.model.status in ("finished", "errored"):
            self._apply_event("requeued")
        if self.model.status == "paused":
            self._apply_event("resumed")
        if self.model.status != "running":
            self._start_attempt()
        return owner

    @rule(index=st.integers(0, 9))
    def turn(self, index: int) -> None:
        """Append an event that changes the trial's status but not its checkpoints."""
        self._ensure_owner()
        possible = sorted(NEXT_STATUS[self.model.status])
        self._apply_event(possible[index % len(possible)])

    def _apply_event(self, kind: str) -> None:
        assert self.owner
        self.owner.append([make_event(kind, KEY.trial)])
        self.model.status = NEXT_STATUS[self.model.status][kind]
        if self.model.status != "running":
            self.owner.pending.clear()

    # -------------------------------------------------------------------------------------- the owner's operations

    def _train(self, steps: int) -> Session:
        owner = self._ensure_running()
        for _ in range(steps):
            owner.train()
        self.model.step += steps
        return owner

    @rule(steps=st.integers(1, 2))
    def train(self, steps: int) -> None:
        self._train(steps)

    @rule(steps=st.integers(1, 2), times=st.integers(1, 4))
    def save(self, steps: int, times: int) -> None:
        for _ in range(times):
            self._train(steps).save()
            self._record_save(self.witness.acknowledged[-1])
            self._check_inheritance()

    def _record_save(self, save: Save) -> None:
        assert save[0] == self.model.step
        self.model.live.append(save)
        self.model.files[save] = self.witness.saved[save]

    def _check_inheritance(self) -> None:
        """Check that found damage is quarantined, and that a save inherits none older than its period."""
        owner, live = self.owner, self.model.last_two()
        assert owner
        self.model.live = [(ref.step, ref.sequence) for ref in owner.trial.checkpoints]
        assert self._is_allowed(self.model.live, live)
        assert self.model.live[-1:] == live[-1:]
        newest = self._manifest(live[-1])
        read_ranges = [verify_range(self.store, newest, piece) for piece in plan_reads(newest)]
        self.model.saves_since.update(self.model.damaged)
        assert all(self.model.saves_since[piece.path] < owner.reverify_every for piece in read_ranges if piece)

    @rule(nth=st.integers(1, 16), failure=st.sampled_from([Failure.CRASH_BEFORE, Failure.CRASH_AFTER, Failure.TORN]))
    def die_in_a_save(self, nth: int, failure: Failure) -> None:
        owner = self._train(1)
        owner.store = DyingStore(self.store, nth, failure)
        count = len(self.witness.acknowledged)
        unsure = (self.model.step, owner.trial.next_sequence)
        with suppress(Crash):
            owner.save()
        if len(self.witness.acknowledged) > count:
            self._record_save(unsure)
            self._check_inheritance()
        else:
            self.model.unsure = unsure
            self.model.files[unsure] = self.witness.saved.get(unsure, [])
        self.owner = None

    @rule(cause=st.sampled_from([Cause.MACHINE, Cause.TRAINABLE, Cause.PREEMPTED]), gives_up_on_a_save=st.booleans())
    def fail_and_go_on(self, cause: Cause, *, gives_up_on_a_save: bool) -> None:
        """Start another attempt of the same owner; the unsettled save of the last attempt does not count."""
        owner = self._ensure_running()
        if gives_up_on_a_save:
            self._train(1).publish()
        owner.append([AttemptEnded(trial=KEY.trial, cause=cause, reason="x")])
        owner.pending.clear()
        self.model.status = "pending"
        self._start_attempt()

    def _start_attempt(self) -> None:
        """Begin an attempt from the newest undamaged checkpoint."""
        assert self.owner
        self.owner.pending.clear()
        self.owner.start()
        self.model.status = "running"
        while self.model.live and self._is_damaged(self.model.live[-1]):
            self.model.live.pop()
        self.model.step = self.model.live[-1][0] if self.model.live else 0
        assert self.owner.trial.step == self.model.step

    @precondition(lambda self: self.owner and len(self.model.live) > 1)
    @rule()
    def retire_the_oldest(self) -> None:
        owner = self._ensure_owner()
        step, sequence = self.model.live.pop(0)
        owner.append([CheckpointsRetired(trial=KEY.trial, retired_sequences=(sequence,))])
        owner.delete_checkpoints([CheckpointKey(trial=KEY, step=step, sequence=sequence)])

    # ---------------------------------------------------------------------------- superseded owners and damage

    @precondition(lambda self: self.zombies)
    @rule(index=st.integers(0, 5), operation=st.sampled_from(["save", "publish", "collect", "append"]))
    def a_zombie_wakes_up(self, index: int, operation: str) -> None:
        zombie = self.zombies[index % len(self.zombies)]
        if operation == "collect":
            zombie.delete_checkpoints(zombie.to_delete)
            return
        if zombie.trial.phase.value != "running":
            operation = "append"
        else:
            zombie.train()
        if operation == "publish":
            zombie.publish()
            return
        count = len(self.witness.acknowledged)
        with pytest.raises(Superseded):
            zombie.save() if operation == "save" else zombie.append([])
        assert len(self.witness.acknowledged) == count

    @precondition(lambda self: self.model.live)
    @rule(index=st.integers(0, 5), offset=st.integers(0, 10**6))
    def a_disk_rots(self, index: int, offset: int) -> None:
        """Alter one byte of a blob, which damages every checkpoint that shares it."""
        save = self.model.live[index % len(self.model.live)]
        paths = sorted(self._manifest(save).blob_paths())
        path = paths[offset % len(paths)]
        data = bytearray(self.store.objects[path])
        data[offset % len(data)] ^= 1
        self.store.objects[path] = bytes(data)
        self.model.damaged.add(path)
        self.model.saves_since[path] = 0

    def _is_damaged(self, save: Save) -> bool:
        manifest = self._manifest(save)
        try:
            load_files(self.store, manifest)
        except (CheckpointCorrupt, CheckpointNotFound):  # the interrupted save may have quarantined or retired it
            assert manifest.blob_paths() & self.model.damaged
            return True
        return False

    def _manifest(self, save: Save) -> Manifest:
        return read_manifest(self.store, CheckpointKey(trial=KEY, step=save[0], sequence=save[1]))

    # --------------------------------------------------------------------------------- invariants

    @invariant()
    def every_live_checkpoint_is_whole_or_was_damaged(self) -> None:
        for save in self.model.live:
            if not self._is_damaged(save):
                assert load_files(self.store, self._manifest(save)) in self.model.files[save]

    @precondition(lambda self: self.owner)
    @invariant()
    def the_journal_says_what_was_acknowledged(self) -> None:
        assert self.owner
        assert [(ref.step, ref.sequence) for ref in self.owner.trial.checkpoints] == self.model.live

    @precondition(lambda self: self.owner)
    @invariant()
    def it_is_where_it_is_said_to_be(self) -> None:
        assert self.owner
        assert self.owner.trial.phase.value == self.model.status

    @precondition(lambda self: self.owner)
    @invariant()
    def whatever_is_of_no_use_can_be_found(self) -> None:
        assert self.owner
        assert find_unreachable(self.store, self.owner.trial) == []


CI = settings(
    max_examples=200,
    stateful_step_count=20,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
DEEP = settings(CI, stateful_step_count=50, derandomize=False)


@pytest.fixture
def transitions(monkeypatch: pytest.MonkeyPatch) -> set[tuple[trials.Phase, type[AnyTrialEvent | ExperimentForked]]]:
    """The transitions of trials in the test."""
    transitions: set[tuple[trials.Phase, type[AnyTrialEvent | ExperimentForked]]] = set()

    def record_event(trial: trials.Trial, event: AnyTrialEvent, writer: Writer) -> trials.Trial:
        next_trial = trials.apply_trial_event(trial, event, writer)
        transitions.add((trial.phase, type(event)))
        return next_trial

    def record_fork(trial: trials.Trial, fork: ForkedTrial) -> trials.Trial:
        transitions.add((trial.phase, ExperimentForked))
        return trials.apply_fork(trial, fork)

    monkeypatch.setattr(folding, "apply_trial_event", record_event)
    monkeypatch.setattr(folding, "apply_fork", record_fork)
    return transitions


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whatever_happens_it_is_as_the_models_have_it_and_every_transition_is_seen(
    transitions: set[tuple[trials.Phase, type[AnyTrialEvent | ExperimentForked]]],
    record_property: Callable[[str, object], None],
) -> None:
    run_state_machine_as_test(Trial, settings=CI)
    run_state_machine_as_test(Family, settings=settings(CI, max_examples=30))
    family = Family()  # few examples fork a search while a trial runs: here is one
    family.begin()
    family.save(NAMES[0])
    family.fork(NAMES, 0)
    family.teardown()
    for _ in range(5):  # examples depend on the imported modules of other tests: a rare transition may be missing
        if set(trials.NEXT_PHASE) - transitions:
            run_state_machine_as_test(Trial, settings=settings(CI, derandomize=False))
    assert set(trials.NEXT_PHASE) - transitions == set()
    record_property("figure: transitions of a trial, each seen by the state machines", len(trials.NEXT_PHASE))


@pytest.mark.deep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("machine", "examples"), [(Trial, deep_count(1000)), (Family, deep_count(250))])
def test_whatever_happens_for_long_it_is_as_the_models_have_it(
    machine: type[RuleBasedStateMachine], examples: int
) -> None:
    run_state_machine_as_test(machine, settings=settings(DEEP, max_examples=examples))
