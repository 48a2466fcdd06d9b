"""Deployments and automations: their specifications, and their installation on a Prefect server."""
