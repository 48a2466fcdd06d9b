"""Terminal output: values, tables, and the progress of a running search; independent of Prefect."""
