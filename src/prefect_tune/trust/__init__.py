"""Checks on code that a journal names, before a resume runs it."""
