"""The commands of the panel *Getting started*: the demo, and the check of a storage target."""
