"""Deployments and automations: their specifications, and applying them to a Prefect server."""
