"""Models built on qkv's attention: one file a model, each readable alone."""

from qkv.models.bert import Bert as Bert
from qkv.models.bert import BertConfig as BertConfig
from qkv.models.bert import BertForMaskedLM as BertForMaskedLM
from qkv.models.bert import BertOutput as BertOutput
from qkv.models.files.tokenizer import TokenBatch as TokenBatch
from qkv.models.files.tokenizer import Tokenizer as Tokenizer
from qkv.models.gpt import GPT as GPT
from qkv.models.gpt import GPTConfig as GPTConfig
from qkv.models.hybrid import Hybrid as Hybrid
from qkv.models.hybrid import HybridConfig as HybridConfig
from qkv.models.llama import Llama as Llama
from qkv.models.llama import LlamaConfig as LlamaConfig
from qkv.models.loading import from_pretrained as from_pretrained
from qkv.models.minilm import MiniLM as MiniLM
from qkv.models.output import ModelOutput as ModelOutput
from qkv.models.smollm2 import SmolLM2 as SmolLM2
from qkv.models.t5 import T5 as T5
from qkv.models.t5 import T5Config as T5Config
from qkv.models.vit import ViT as ViT
from qkv.models.vit import ViTConfig as ViTConfig
from qkv.models.vit import ViTForImageClassification as ViTForImageClassification
from qkv.models.vit import ViTOutput as ViTOutput
