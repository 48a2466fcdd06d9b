"""Code of the trial process, without Prefect: trainable, session, checkpoint, fork server."""
