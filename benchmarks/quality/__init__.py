"""How good a configuration a search finds for the training time that it spends."""
