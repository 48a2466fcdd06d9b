"""The stories: durable training, told in tasks."""
