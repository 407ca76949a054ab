"""Where the lighton-* scripts are written: one room a subject, joined by tools/build.py into the files at the top."""
