"""The local side of transfers: directories to upload or fill, temporary directories, shared copies, and locks."""
