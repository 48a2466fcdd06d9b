"""The drill: train a trainable undisturbed, then again with kills, and compare the two runs bit for bit."""
