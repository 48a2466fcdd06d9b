"""Write the state of a run as a tree of files that later versions must be able to read.

Run once for each released version of a document: `python -m tests.core.documents.write_golden
tests/core/documents/golden/version-1`, named for the journal's version. Released files are never rewritten.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prefect_tune.core.journal_events import AttemptEnded, Cause, CheckpointQuarantined, TrialRequeued
from prefect_tune.core.reasons import make_reason
from tests.core.driver import KEY, Session, Witness
from tests.core.histories import snapshots_every
from tests.fakes.stores.memory_store import MemoryStore


@snapshots_every(10)
def golden_run() -> MemoryStore:
    """Return the store of a run with two owners, an adoption, a retirement, a quarantine, an end and a requeue."""
    store, witness = MemoryStore(), Witness()
    first = Session(store, witness, owner="first")
    first.open()
    first.start()
    for _ in range(3):
        first.train()
        first.save()
    first.train()
    first.publish()  # the first owner crashes here
    second = Session(store, witness, owner="second")
    second.open()
    second.start()
    second.train()
    second.save()
    sequence = second.trial.checkpoints[-1].sequence
    second.append([CheckpointQuarantined(trial=KEY.trial, sequence=sequence, reason="poison")])
    reason = "ValueError: x"
    second.append([AttemptEnded(trial=KEY.trial, cause=Cause.TRAINABLE, reason=reason, before_first_step=True)])
    second.start()
    second.finish()
    second.append([TrialRequeued(trial=KEY.trial, reason=make_reason("extended", step=second.trial.step))])
    second.start()
    second.train()
    second.save()
    return store


def main() -> None:
    root = Path(sys.argv[1])
    for path, data in golden_run().objects.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)


if __name__ == "__main__":
    main()
