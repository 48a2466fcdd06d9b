"""One attempt of a trial, above its processes: its request, journal, supervisor, commits and end."""
