"""Layers."""

from qkv.nn.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from qkv.nn.gated_linear_attention import GatedLinearAttention as GatedLinearAttention
from qkv.nn.kimi_delta_attention import KimiDeltaAttention as KimiDeltaAttention
from qkv.nn.layer_state import LayerSnapshot as LayerSnapshot
from qkv.nn.layer_state import LayerState as LayerState
from qkv.nn.linear_attention import LinearAttention as LinearAttention
from qkv.nn.mamba2 import Mamba2Mixer as Mamba2Mixer
from qkv.nn.retention import Retention as Retention
