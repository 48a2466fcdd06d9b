"""The results of an experiment: best trial, all trials, errors, tables."""
