"""Executors of trial attempts: on this machine, on a task runner, or as deployment runs."""
