"""What a target asks of a search that serves one runner only."""

from __future__ import annotations

from prefect_tune.core.errors import InvalidInput

__all__ = ["require_one_runner"]


def require_one_runner(uri: str, *, exploiting: str, elsewhere: str) -> None:
    """Refuse what has a journal written by two at once, before anything is begun on a target that cannot bear it.

    Args:
        uri: the target's, which has no atomic create-if-absent.
        exploiting: the scheduler, if its trials go on from each other's checkpoints; empty where they do not.
        elsewhere: who trains, if that is not this process; empty where it is.

    Raises:
        InvalidInput: it is asked for.
    """
    if exploiting:
        why = "its trials clone each other's checkpoints, and write that into each other's journals"
        _refuse(uri, f"scheduler: {exploiting}", why, "a scheduler that clones none (FIFO, ASHA, Hyperband)")
    if elsewhere:
        why = "an attempt elsewhere that is taken for lost may live, and write beside its successor"
        _refuse(uri, elsewhere, why, "trials='tasks' on the threads of the flow run")


def _refuse(uri: str, asked: str, why: str, instead: str) -> None:
    raise InvalidInput(
        f"{asked}, at {uri}: {why}. Expected a target with atomic create-if-absent, found one without (ONE RUNNER "
        "ONLY), where one of two writers destroys what the other wrote. Nothing was started: take S3, GCS, Azure or a "
        f"folder (prefect-tune blocks check TARGET), or {instead}"
    )
