"""The commands of the panel *Checkpoints and storage*: they read, verify, copy and delete what is stored."""
