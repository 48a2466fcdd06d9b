"""The parameters of the flow `train_trial`: a trial's specification and the request for one attempt, as JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter

from prefect_tune.blocks import SyncConfig, resolve_target, target_reference
from prefect_tune.core.checkpoints.cadence import Cadence
from prefect_tune.core.errors import InvalidInput
from prefect_tune.core.experiment.retention import Retention
from prefect_tune.core.models import Value
from prefect_tune.core.storage.layout import TrialKey
from prefect_tune.supervisor.trial_spec import AttemptRequest, Reuse, TrialSpec

_orders: TypeAdapter[AttemptRequest] = TypeAdapter(AttemptRequest)


_AS_TEXT = "json"


class TrialParameters(Value):
    """A `TrialSpec` as flow run parameters: without secrets, and valid in any process."""

    target: str
    trial: TrialKey
    trainable: str
    stopper: str
    needs_curve: bool
    cadence: Cadence
    retention: Retention
    sync: dict[str, Any]
    fingerprint: dict[str, str]
    grace_period_seconds: float
    silence_timeout_seconds: float | None
    tags: tuple[str, ...] = ()
    concurrency_limits: tuple[str, ...] = ()
    reuse: Reuse = "auto"

    @classmethod
    def of(cls, spec: TrialSpec) -> TrialParameters:
        """Return the parameters of `spec`.

        Raises:
            InvalidInput: the trainable is not an import path, the target needs secrets, or trials are threads.
        """
        if ":" not in spec.trainable:
            raise InvalidInput(
                "trials='deployment': another machine has to import the trainable; pass it as 'package.module:Name'"
            )
        if spec.isolation != "process":
            raise InvalidInput("isolation='thread': trials that run as deployments run in processes")
        return cls(
            **{name: getattr(spec, name) for name in _same_names()},
            target=target_reference(spec.target),
            sync=spec.sync.parameters(),
            grace_period_seconds=spec.grace.total_seconds(),
            silence_timeout_seconds=spec.silence.total_seconds() if spec.silence else None,
        )

    def spec(self) -> TrialSpec:
        """Return the specification of these parameters."""
        silence = self.silence_timeout_seconds
        return TrialSpec(
            **{name: getattr(self, name) for name in _same_names()},
            target=resolve_target(self.target),
            sync=SyncConfig.model_validate(self.sync),
            grace=timedelta(seconds=self.grace_period_seconds),
            silence=None if silence is None else timedelta(seconds=silence),
            apart=True,
        )


def _same_names() -> Collection[str]:
    """Return the fields that are the same in both."""
    return TrialParameters.model_fields.keys() & {each.name for each in fields(TrialSpec)} - {"target", "sync"}


def request_as_parameters(request: AttemptRequest) -> dict[str, Any]:
    """Return `request` as a parameter: one JSON text, which Prefect does not interpret.

    It holds configurations and answers from a target. In an object, Prefect would load blocks that it refers to
    (`$ref`), and render templates (`__prefect_kind`).
    """
    return {_AS_TEXT: _orders.dump_json(request).decode()}


def request_from(parameter: Mapping[str, Any]) -> AttemptRequest:
    """Return the request from `request_as_parameters`."""
    return _orders.validate_json(parameter[_AS_TEXT])
