"""Model shapes, timing and reporting that the benchmark scripts share."""
