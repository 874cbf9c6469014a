"""What uses the engine through its public API."""
