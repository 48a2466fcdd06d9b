"""The commands of the panel *Search*: they start, resume, stop and deploy searches."""
