"""What several commands share: the application and its arguments, opened experiments, the parsing of options."""
