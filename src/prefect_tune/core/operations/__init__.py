"""Operations on experiments, trials and checkpoints: clone, fork, delete, garbage collection, scrub, quarantine."""
