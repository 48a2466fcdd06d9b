"""Reports of an experiment: facts, charts, Markdown and HTML. The functions are pure: no Prefect, target or clock."""
