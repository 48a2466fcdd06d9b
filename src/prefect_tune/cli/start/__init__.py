"""The commands of the panel *To begin with*: the demo, and the check of a storage target."""
