"""The object store protocol, the paths of all objects, conditional creates, and checksummed documents."""
