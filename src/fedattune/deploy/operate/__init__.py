"""Operate a deployment: folder, programs, checks, metrics and audit."""
