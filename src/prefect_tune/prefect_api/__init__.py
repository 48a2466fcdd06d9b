"""Code that relies on details of Prefect: the API client, local server, flow class and argument checks."""
