"""Files as objects, on a local disk or a mounted file system."""
