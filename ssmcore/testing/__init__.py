"""Tools to test strategies with: the matrix of all combinations, and what it measures against."""
