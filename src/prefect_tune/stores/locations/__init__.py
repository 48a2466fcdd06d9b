"""URIs and paths of targets and checkpoints, and the stores that they name."""
