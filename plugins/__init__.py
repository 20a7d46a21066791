"""Strategies bundled with ssmcore, one module each; none imports another."""
