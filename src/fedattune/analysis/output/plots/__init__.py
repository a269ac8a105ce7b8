"""Figures for papers and for the report."""
