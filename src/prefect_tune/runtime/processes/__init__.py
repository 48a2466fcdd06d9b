"""The main programs of trial processes: the fork server and a single trial; and how they reset a process."""
