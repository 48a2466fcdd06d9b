"""Everything that a journal can record."""
