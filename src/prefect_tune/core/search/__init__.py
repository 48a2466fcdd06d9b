"""Which configurations are tried: the space, and who proposes from it."""
