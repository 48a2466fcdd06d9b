"""The state of an experiment and its trials, folded from events, and the rules that change it."""
