"""One maintenance run over a target and its report, and the deletion of an experiment."""
