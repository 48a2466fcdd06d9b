"""Local directories at both ends of a transfer: staging, download, scratch, node cache, locks."""
