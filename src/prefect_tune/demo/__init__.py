"""The demo: train on real data, kill the run in the middle of an upload, resume it, compare the results."""
