"""Differential privacy: accounting, and the noise on what leaves a client."""
