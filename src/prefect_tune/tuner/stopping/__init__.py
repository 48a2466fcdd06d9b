"""Stop a search or one of its trials early: requests from anywhere, budgets, and their effects."""
