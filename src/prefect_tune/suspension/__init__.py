"""Suspend a run, ask a person, resume with the answer."""
