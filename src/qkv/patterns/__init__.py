"""What a query may see: patterns, their algebra, their text and their compilation to block schedules."""

from qkv.patterns.given import blocks as blocks
from qkv.patterns.given import documents as documents
from qkv.patterns.given import key_lengths as key_lengths
from qkv.patterns.given import key_padding as key_padding
from qkv.patterns.given import mask as mask
from qkv.patterns.given import where as where
from qkv.patterns.named import axial as axial
from qkv.patterns.named import bigbird as bigbird
from qkv.patterns.named import block_local as block_local
from qkv.patterns.named import causal as causal
from qkv.patterns.named import dilated as dilated
from qkv.patterns.named import fixed as fixed
from qkv.patterns.named import full as full
from qkv.patterns.named import global_tokens as global_tokens
from qkv.patterns.named import longformer as longformer
from qkv.patterns.named import neighborhood as neighborhood
from qkv.patterns.named import per_head as per_head
from qkv.patterns.named import prefix as prefix
from qkv.patterns.named import random_blocks as random_blocks
from qkv.patterns.named import sliding_window as sliding_window
from qkv.patterns.named import sparse_transformer as sparse_transformer
from qkv.patterns.named import strided as strided
from qkv.patterns.named import window as window
from qkv.patterns.named import windows2d as windows2d
from qkv.patterns.pattern import Pattern as Pattern
from qkv.patterns.text import parse as parse
