"""Reports of an experiment: facts, charts, Markdown and HTML. Pure functions that use no Prefect, target or clock."""
