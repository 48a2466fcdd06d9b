"""An experiment as a page to look at: facts, charts, Markdown and HTML. Pure: no Prefect, no target, no clock."""
