"""One maintenance run over a target, and its report."""
