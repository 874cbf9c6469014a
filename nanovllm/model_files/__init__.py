"""The files of a model directory: where they come from, and how those in JSON are read."""
