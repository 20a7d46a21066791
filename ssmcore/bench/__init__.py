"""Measuring the engine under real load: replay of serving traces."""
