"""The public tasks, one file each: plain arguments, resolved once, and then the functions of the engine's own tasks.

`prefect_tune.tasks` exports them.
"""
