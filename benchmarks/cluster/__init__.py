"""A search with many concurrent trials on the workers of a cluster, with prefect-tune on Dask and with Ray Tune."""
