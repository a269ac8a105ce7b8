"""A node of a deployment."""
