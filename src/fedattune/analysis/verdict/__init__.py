"""The verdict: choice of a method, harm, statistics and baselines."""
