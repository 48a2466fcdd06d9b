"""Code of the trial process, without Prefect: trainable, session, checkpoint; in `processes` its main programs."""
