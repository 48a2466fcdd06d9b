"""The names of schedulers, searches and stoppers in JSON, in forms and on the command line; none is imported here."""

from collections.abc import Mapping

BUILT_IN_MODULES = {
    "scheduler": {
        "FIFO": "prefect_tune.core.schedulers.base",
        "ASHA": "prefect_tune.core.schedulers.asha",
        "Hyperband": "prefect_tune.core.schedulers.hyperband",
        "MedianStopping": "prefect_tune.core.schedulers.median_stopping",
        "PBT": "prefect_tune.core.schedulers.pbt",
    },
    "search": {
        "RandomSearch": "prefect_tune.core.search.random_search",
        "OptunaSearch": "prefect_tune.integrations.optuna",
    },
    "stop": dict.fromkeys(
        ("MaxSteps", "MaxTime", "Plateau", "MaxFailures", "TrialBudget", "TimeBudget", "ExperimentPlateau"),
        "prefect_tune.core.experiment.stoppers",
    ),
}
"""For each parameter, such as `stop`: the names of the classes that have a JSON form, each with its module."""

OPTION_FIELDS: Mapping[str, str] = {
    "ASHA": "max_t grace_period reduction_factor brackets variant",
    "Hyperband": "max_t reduction_factor",
    "MedianStopping": "grace_period min_samples_required interval min_time_slice",
    "PBT": "perturbation_interval hyperparam_mutations quantile_fraction resample_probability perturbation_factors "
    "burn_in_period",
    "RandomSearch": "num_samples points_to_evaluate constant_grid_search",
    "OptunaSearch": "sampler num_samples points_to_evaluate constraints",
    "Plateau": "metric std reports grace",
    "ExperimentPlateau": "metric std top mode patience",
    "MaxSteps": "steps",
    "MaxTime": "time",
    "MaxFailures": "failures",
    "TrialBudget": "trials",
    "Repeated": "search times index_as",
    "Cadence": "every_steps every_seconds at_end",
    "Retention": "last best metric mode every",
    "FailurePolicy": "max_failures max_machine_failures max_restarts quarantine_after",
}
"""The fields of each class. They identify the class of a dict with exactly these keys that lacks the class's name."""
