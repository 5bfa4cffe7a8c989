"""Programs that show memsaver at work."""
