"""What people see in a terminal: values, tables, and a search that is running. No Prefect is needed."""
