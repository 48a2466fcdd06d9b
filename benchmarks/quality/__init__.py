"""The quality of the configuration that a search finds for the training time that it spends."""
