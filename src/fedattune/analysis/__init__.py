"""Analyse runs: comparison, verdict, who learns from whom, plots and reports."""
