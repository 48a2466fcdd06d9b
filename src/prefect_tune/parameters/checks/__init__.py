"""Checks of the parameters of a run, before it writes anything."""
