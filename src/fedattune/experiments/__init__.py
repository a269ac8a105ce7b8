"""Run experiments: several methods and seeds, deployments, and the papers' tables."""
