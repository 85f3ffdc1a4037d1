"""The recovery service: supervision, semantic readiness, accounting, and a reference engine."""
