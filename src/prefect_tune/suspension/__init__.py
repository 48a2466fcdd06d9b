"""Suspend a run, ask a person, resume with the answer; and the guard against restart loops."""
