"""Restore checkpoints, adopt orphaned saves, and tell damage from stale reads and deletions."""
