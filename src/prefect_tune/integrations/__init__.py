"""Integrations of other libraries, each an extra: training frameworks and Optuna."""
