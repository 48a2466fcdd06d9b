"""Object stores, and the transfer of files between them and local directories; independent of Prefect."""
