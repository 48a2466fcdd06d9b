"""Observers of a running search: callbacks, Prefect events, assets, progress, the live report."""
