"""One retryable, timed act each: run a trial, save, restore, delete, sync."""
