"""The schedulers. `prefect_tune.registry` lists the schedulers that JSON can name, as in `{"ASHA": {"max_t": 81}}`."""
