"""Trace which files of the package a value passes, from the call that brings it to what is stored and seen."""
