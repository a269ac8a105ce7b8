"""Who learns from whom: mixing matrices, partners, clusters and decisions."""
