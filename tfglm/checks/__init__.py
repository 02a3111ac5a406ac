"""Suites that measure a served model: problems from a seed, grading, a sandbox for code, a client and tables."""
