"""The newer engine."""
