"""Parameters of the flows: parsing, validation, JSON, form schemas, compatibility on resume."""
