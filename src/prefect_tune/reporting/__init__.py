"""Reports of an experiment: facts, charts, Markdown and HTML. The functions use no Prefect, no target and no clock."""
