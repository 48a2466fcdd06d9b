"""Schedulers: which trials continue, pause, stop or exploit; deterministic functions of the reports.

`prefect_tune.registry` lists the ones that have a name in JSON.
"""
