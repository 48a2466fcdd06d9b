"""Chunks, commits, manifests and metadata of checkpoints."""
