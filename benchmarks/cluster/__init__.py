"""A search of many trials at a time on the workers of a cluster, with prefect-tune on Dask and with Ray Tune."""
