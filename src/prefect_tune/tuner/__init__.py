"""The search engine: driver loop, search policy, early stops, warm start."""
