"""The local directories of transfers: files to send, downloaded files, temporary files, shared copies; and locks."""
