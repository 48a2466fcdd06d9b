"""Other libraries, each an extra: what trains, what searches, what shows results."""
