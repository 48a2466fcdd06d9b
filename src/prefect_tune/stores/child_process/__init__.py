"""A blocking object store in a child process that can be killed."""
