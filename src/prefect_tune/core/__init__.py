"""The rules, in pure Python: no clock, no environment, no I/O of its own."""
