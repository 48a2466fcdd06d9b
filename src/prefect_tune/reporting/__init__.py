"""Reports of an experiment: facts, charts, Markdown and HTML. Pure functions: no Prefect, no target, no clock."""
