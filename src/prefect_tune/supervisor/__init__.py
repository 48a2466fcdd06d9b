"""The supervisor's side of a trial process: pool, channel, output, specification, shutdown."""
