"""The rules of experiments. This code reads no clock or environment variables, and does all I/O through a store."""
