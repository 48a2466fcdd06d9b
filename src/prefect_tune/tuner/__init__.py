"""The search engine: driver loop, search policy, stop handling, warm start."""
