"""The supervisor's side of a trial process: its processes, its specification, its journal, shutdown."""
