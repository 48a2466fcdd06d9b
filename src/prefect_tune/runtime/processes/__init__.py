"""The main programs of the fork server and of a trial's process, and the reset of a process before a trial begins."""
