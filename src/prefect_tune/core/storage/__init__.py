"""The object store protocol, the layout of keys, conditional creates, checksummed documents."""
