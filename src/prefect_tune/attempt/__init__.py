"""An attempt of a trial: its request, journal, supervisor, commits and outcome."""
