"""Models built on qkv's attention: one file a model, each readable alone."""

from qkv.models.bert import Bert as Bert
from qkv.models.bert import BertConfig as BertConfig
from qkv.models.bert import BertOutput as BertOutput
from qkv.models.minilm import MiniLM as MiniLM
