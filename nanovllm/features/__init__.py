"""What a reader may skip: each feature is one package, which `build` passes to the engine."""
