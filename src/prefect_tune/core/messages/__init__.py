"""JSON messages: to and from a trial's process, replies to remote trials, stop requests."""
