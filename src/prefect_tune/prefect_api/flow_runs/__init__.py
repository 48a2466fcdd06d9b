"""Flow runs of Prefect: their identity, states, suspension and failure."""
