"""lit_gen: batched LLM generation, each row exactly as it would be alone."""

from lit_gen.config import Config
from lit_gen.model import GPT
from lit_gen.pack import pack_model
from lit_gen.settings import Request, Settings
from lit_gen.tokenizer import Tokenizer

__all__ = ["GPT", "Config", "Request", "Settings", "Tokenizer", "pack_model"]
