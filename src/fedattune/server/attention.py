"""Mixing matrices from how alike the clients' models are."""
