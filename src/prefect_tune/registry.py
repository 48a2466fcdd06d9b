"""The schedulers, searches and stoppers that JSON, forms and the command line name. It imports none of them."""

BUILT_IN = {
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
    "stop": {
        **dict.fromkeys(("MaxSteps", "MaxTime", "Plateau"), "prefect_tune.core.experiment.stoppers"),
        **dict.fromkeys(
            ("MaxFailures", "TrialBudget", "TimeBudget", "ExperimentPlateau"),
            "prefect_tune.core.experiment.stoppers",
        ),
    },
}
"""The modules of the schedulers, searches and stoppers that have a JSON form, by the parameter that takes them."""
