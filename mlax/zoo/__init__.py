"""Models with the weights of other libraries, and text generation."""

from mlax.core import name_types as name_types
from mlax.zoo._batcher import Batcher
from mlax.zoo._beam_search import beam_search
from mlax.zoo._bert import BERT, BERTClassifier, BERTMaskedLM, bert, bert_from_config, minilm, roberta
from mlax.zoo._convnext import ConvNeXt, convnext, convnext_from_config
from mlax.zoo._decoder import choose_fusion as choose_fusion
from mlax.zoo._decoder import decoder, decoding_backend
from mlax.zoo._decoder import init_state as init_state
from mlax.zoo._decoder import prepare_decoder as prepare_decoder
from mlax.zoo._decoder_block import DecoderBlock as DecoderBlock
from mlax.zoo._decoder_block import DecoderStack as DecoderStack
from mlax.zoo._decoder_block import PaddedEmbed as PaddedEmbed
from mlax.zoo._decoder_block import find_obstacle as find_obstacle
from mlax.zoo._diffusion import Diffusion, ddim, ddpm
from mlax.zoo._generate import Generated, generate
from mlax.zoo._generate import Settings as Settings
from mlax.zoo._generate import generate_tokens as generate_tokens
from mlax.zoo._gpt2 import GPT2, gpt2, gpt2_from_config
from mlax.zoo._images import normalize_images
from mlax.zoo._llama import Llama, llama_from_config
from mlax.zoo._llama_sizes import gemma, gemma2, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3
from mlax.zoo._load import Loaded, load
from mlax.zoo._load_weights import load_weights
from mlax.zoo._lstm import LSTMLanguageModel, lstm_lm
from mlax.zoo._resnet import ResNet, resnet, resnet_from_config
from mlax.zoo._sampling import Greedy, Sample
from mlax.zoo._save import save
from mlax.zoo._sentences import SentenceEncoder
from mlax.zoo._speculative import Speculated, speculative_generate
from mlax.zoo._state_dict import state_dict
from mlax.zoo._stream import stream
from mlax.zoo._t5 import T5, t5, t5_from_config
from mlax.zoo._tokenizers import ByteTokenizer, EncodedPairs, Tokenizer, load_tokenizer
from mlax.zoo._unet import UNet, unet, unet_from_config
from mlax.zoo._vae import VAE, vae, vae_from_config
from mlax.zoo._vit import ViT, deit, resize_positions, vit, vit_from_config
from mlax.zoo._weights import Weight, WeightMap, map_batch_norm, map_conv, map_embed, map_linear, map_norm

__all__ = [
    "BERT",
    "GPT2",
    "T5",
    "VAE",
    "BERTClassifier",
    "BERTMaskedLM",
    "Batcher",
    "ByteTokenizer",
    "ConvNeXt",
    "Diffusion",
    "EncodedPairs",
    "Generated",
    "Greedy",
    "LSTMLanguageModel",
    "Llama",
    "Loaded",
    "ResNet",
    "Sample",
    "SentenceEncoder",
    "Speculated",
    "Tokenizer",
    "UNet",
    "ViT",
    "Weight",
    "WeightMap",
    "beam_search",
    "bert",
    "bert_from_config",
    "convnext",
    "convnext_from_config",
    "ddim",
    "ddpm",
    "decoder",
    "decoding_backend",
    "deit",
    "gemma",
    "gemma2",
    "gemma3",
    "generate",
    "gpt2",
    "gpt2_from_config",
    "llama",
    "llama_from_config",
    "load",
    "load_tokenizer",
    "load_weights",
    "lstm_lm",
    "map_batch_norm",
    "map_conv",
    "map_embed",
    "map_linear",
    "map_norm",
    "minilm",
    "mistral",
    "mixtral",
    "normalize_images",
    "phi3",
    "qwen2",
    "qwen3",
    "resize_positions",
    "resnet",
    "resnet_from_config",
    "roberta",
    "save",
    "speculative_generate",
    "state_dict",
    "stream",
    "t5",
    "t5_from_config",
    "unet",
    "unet_from_config",
    "vae",
    "vae_from_config",
    "vit",
    "vit_from_config",
]

name_types(globals())
