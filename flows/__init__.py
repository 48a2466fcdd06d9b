"""The flows: durable training and hyperparameter search, composed of tasks."""
