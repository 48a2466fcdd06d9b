"""Public lifecycle events, health rules, and the position of each subscriber."""
