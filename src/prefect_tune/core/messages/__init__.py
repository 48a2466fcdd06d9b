"""JSON messages to and from a trial's process, and between machines: answers to trials, stop requests, live status."""
