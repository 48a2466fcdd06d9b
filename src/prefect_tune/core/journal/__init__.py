"""The journal of an experiment: numbered entries, fencing of owners, snapshots."""
