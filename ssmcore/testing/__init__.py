"""Tools to test strategies with."""
