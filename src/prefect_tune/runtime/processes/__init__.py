"""The main programs of trial processes, and what they need of Linux: the fork server, and a trial."""
