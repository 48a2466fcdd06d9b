"""The commands of the panel *Look*: they read experiments."""
