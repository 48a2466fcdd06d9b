"""Upload and download of a trial's artifacts: the `Syncer` interface and the built-in one."""
