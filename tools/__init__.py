"""Scripts about the code itself."""
