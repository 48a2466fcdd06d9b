"""The state of an experiment and its trials, computed from events, and the rules that change this state."""
