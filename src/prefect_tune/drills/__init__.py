"""The drill: train a trainable undisturbed, and again with kills; compare the two runs, bit for bit."""
