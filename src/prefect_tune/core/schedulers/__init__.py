"""Which trials go on, and which do not: pure functions of what was reported."""
