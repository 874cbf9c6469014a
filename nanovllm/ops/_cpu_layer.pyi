_Address = tuple[int, int]

class Linear:
    def __init__(self, *, weight: int, bias: int, in_features: int, out_features: int, sum_block: int) -> None: ...

class Norms:
    def __init__(self, *, input: int, heads: int, post: int, eps: float) -> None: ...

class Layer:
    def __init__(
        self, *, norms: Norms, qkv: Linear, o: Linear, gate_up: Linear, down: Linear, head_dim: int
    ) -> None: ...
    def project(
        self, x: _Address, cos: _Address, sin: _Address, q: _Address, k: _Address, v: _Address,
        count: int, q_heads: int, kv_heads: int, threads: int, /,
    ) -> None: ...
    def finish(self, x: _Address, attended: _Address, count: int, threads: int, /) -> None: ...
