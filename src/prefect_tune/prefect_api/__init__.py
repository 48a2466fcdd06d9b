"""Code that relies on details of Prefect: its API client, local server, flow class, argument checks."""
