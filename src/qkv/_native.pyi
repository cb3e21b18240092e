# The module that csrc/bind.cpp makes. Pointers are integers, 0 where there is nothing; what they point to must outlive
# the call, and for a Plan the Plan.

from typing import Any, TypeAlias

ABI: int

_Four: TypeAlias = tuple[int, ...]
_Sizes: TypeAlias = tuple[int, int, int, int, int, int, int]  # B, H, G, L, S, D, V
# query_rows, query_count, key_rows, key_count, rows, cols, row_ptr, runs, partial_ptr, partial, masks
_Part: TypeAlias = tuple[int, ...]
_Bias: TypeAlias = tuple[int, int, _Four, _Four]  # kind, type, sizes, strides

def isa() -> str: ...
def available_isas() -> list[str]: ...
def choose_isa(name: str) -> bool: ...
def prefer_large_pages(data: int, bytes: int) -> None: ...  # noqa: A002

# csrc/bind_beside.cpp tells the arguments, which are positional.
def convolution(*asked: Any) -> None: ...
def convolution_backward(*asked: Any) -> None: ...
def norm(*asked: Any) -> None: ...
def norm_backward(*asked: Any) -> None: ...
def project(*asked: Any) -> None: ...

class Plan:
    def __init__(
        self, members: list[list[_Part]], index_ptr: int, index_batch_stride: int, index_head_stride: int
    ) -> None: ...

class Call:
    def __init__(
        self,
        plan: Plan,
        type: int,  # noqa: A002
        output_type: int,
        sizes: _Sizes,
        query_stride: _Four,
        key_stride: _Four,
        value_stride: _Four,
        scale: float,
        softcap: float,
        bias: _Bias | None,
        dropout_threshold: int,
        query_starts: list[int],
        key_starts: list[int],
        batch_origin: int,
        head_origin: int,
        packed_queries: list[int],
        packed_keys: list[int],
        page_table: int,
        page_stride: int,
        page_size: int,
    ) -> None: ...
    def forward(
        self,
        threads: int,
        seed: int,
        query: int,
        key: int,
        value: int,
        bias: int,
        sinks: int,
        output: int,
        lse: int,
        max_scores: int,
        shift: int,
        total: int,
        entropy: int,
    ) -> None: ...
    def backward(
        self,
        threads: int,
        seed: int,
        grad_output_stride: _Four,
        query: int,
        key: int,
        value: int,
        bias: int,
        sinks: int,
        output: int,
        shift: int,
        total: int,
        grad_output: int,
        grad_lse: int,
        grad_query: int,
        grad_key: int,
        grad_value: int,
        grad_bias: int,
        grad_sinks: int,
    ) -> None: ...

_Three: TypeAlias = tuple[int, ...]  # strides of batch, head and token

class Recurrence:
    def __init__(
        self,
        sizes: tuple[int, int, int, int, int, int],  # N, H, K, L, D, V
        types: tuple[int, ...],  # of q, k, v, of the gate, of beta, of the output
        kinds: tuple[int, int, int, int],  # gate, feature, delta, normalize
        scale: float,
        starts: list[int],
        query: _Three,
        key: _Three,
        value: _Three,
        gate: _Three,
        beta: _Three,
        output: _Three,
    ) -> None: ...
    def forward(
        self,
        threads: int,
        query: int,
        key: int,
        value: int,
        gate: int,
        beta: int,
        before: int,
        output: int,
        after: int,
        checkpoints: int,
    ) -> None: ...
    def backward(
        self,
        threads: int,
        strides: tuple[_Three, ...],  # of the gradients of the output, q, k and v
        query: int,
        key: int,
        value: int,
        gate: int,
        beta: int,
        checkpoints: int,
        output: int,
        grad_output: int,
        grad_after: int,
        grad_query: int,
        grad_key: int,
        grad_value: int,
        grad_gate: int,
        grad_beta: int,
        grad_before: int,
    ) -> None: ...
