"""Task runs of Prefect: how they start, what they log, and how those of dead processes end."""
