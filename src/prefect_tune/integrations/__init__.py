"""Integrations with training frameworks and with Optuna. Each one needs an extra, such as `prefect-tune[torch]`."""
