"""Tables, plots and the report."""
