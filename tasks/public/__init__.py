"""The public tasks: plain arguments, resolved once, and then the functions that the engine's own tasks run.

`prefect_tune.tasks` exports them.
"""
