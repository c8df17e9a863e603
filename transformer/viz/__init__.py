"""Pictures made from arrays and metrics files only."""
