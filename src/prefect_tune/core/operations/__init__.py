"""Operations on whole experiments: clone, fork, delete, garbage collection, scrub, quarantine."""
