"""Steps that transform the uploads of a round before aggregation."""
