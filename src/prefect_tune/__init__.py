"""Durable training and hyperparameter search as Prefect flows."""
