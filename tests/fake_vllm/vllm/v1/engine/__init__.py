"""Its core."""
