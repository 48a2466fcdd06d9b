"""What a search shows in a notebook: one output that is updated in place, its results, and a quiet log."""
