"""The cost of every family of attention, measured on this machine: `qkv.compare.run`, and the command `qkv compare`."""

from qkv.compare.families import FAMILIES as FAMILIES
from qkv.compare.families import Family as Family
from qkv.compare.measuring import run as run
from qkv.compare.record import Comparison as Comparison
from qkv.compare.record import Crossing as Crossing
from qkv.compare.record import Point as Point
from qkv.compare.record import Row as Row
from qkv.compare.setting import Setting as Setting
