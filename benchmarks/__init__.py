"""Model shapes, timing and reporting that the benchmark scripts share."""

import nanovllm  # noqa: F401  # before torch, so that torch's threads wait as they do under `nanovllm`
