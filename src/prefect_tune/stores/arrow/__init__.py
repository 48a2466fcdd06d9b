"""Object stores on pyarrow and fsspec file systems."""
