"""The rules of experiments. They read no clock and no environment variables, and do all I/O through a given store."""
