"""The rules of experiments, which read no clock and no environment; all I/O goes through a store that is passed in."""
