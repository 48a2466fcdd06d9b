"""Parse and check the flows' parameters, convert them to JSON, describe them in forms, and compare them on a resume."""
