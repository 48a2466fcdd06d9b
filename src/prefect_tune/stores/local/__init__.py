"""Local directories for transfers (files to send, downloaded files, temporary files, shared copies), and locks."""
