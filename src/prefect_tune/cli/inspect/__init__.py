"""The commands of the panel *Inspect*: they read experiments."""
