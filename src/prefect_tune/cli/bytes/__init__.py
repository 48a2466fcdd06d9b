"""The commands of the panel *Bytes*: they read, verify, copy and delete what is stored."""
