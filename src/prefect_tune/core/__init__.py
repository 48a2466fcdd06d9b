"""The rules of experiments in pure Python, without a clock or an environment; all I/O goes through a given store."""
