"""Schedulers: which trials continue, pause, stop or exploit; deterministic functions of the reports."""
