"""The schedulers. `prefect_tune.registry` lists the schedulers that have a name in JSON."""
