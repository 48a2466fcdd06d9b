"""An attempt on several nodes: one flow run each, which share the target and nothing else of this package."""
