"""Trainables of the libraries that people use, each a module whose import costs what theirs costs."""
