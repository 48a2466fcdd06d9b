"""The main job, on real data: train, be killed in the middle of an upload, resume, compare."""
