"""The groups of the API reference, in reading order: what most people need first, types and errors last.

A test holds that each public name is in exactly one group.
"""

TITLES = {
    "mlax": "composites, combinators, surgery",
    "nn": "layers",
    "ops": "functions of arrays",
    "dtypes": "dtype boundaries and audits",
    "optim": "optimizers and schedules",
    "place": "plans for devices and hosts",
    "train": "steps, the loop, feeds, checkpoints",
    "inspect": "what a compiled function does",
    "zoo": "models, pretrained weights, text generation",
    "files": "safetensors",
}

GROUPS = {
    "mlax": {
        "Layers and composites": "Layer Composite Sub frozen",
        "Combinators": "Series Parallel Residual F Repeat Chain Map Remat Wrapper Tied Tie",
        "Recurrence": "Recurrent Cell CompositeCell",
        "Model surgery by path": "layers all_layers paths get select merge replace rename override wrap freeze "
        "count stacked_axes unstack",
        "Looking inside": "capture tabulate",
        "Weight initializers": "glorot he lecun VarianceScaling Normal TruncatedNormal Uniform Orthogonal Identity "
        "Constant Zeros Ones Initializer",
        "Keys and types": "named_key Tree DType Size",
    },
    "nn": {
        "Linear layers": "Linear MLP GLU Bias Scaler PReLU",
        "Embeddings and heads": "Embed EmbedBag CrossEntropyHead",
        "Convolution": "Conv ConvTranspose Patches",
        "Pooling": "MaxPool MeanPool SumPool Pool GlobalPool AdaptivePool",
        "Upsampling and reshaping": "Upsample PixelShuffle PixelUnshuffle Flatten Reshape",
        "Batch, layer and other normalization": "BatchNorm LayerNorm RMSNorm GroupNorm InstanceNorm LocalResponseNorm "
        "WeightNorm SpectralNorm",
        "Dropout": "Dropout ChannelDropout PathDropout AlphaDropout",
        "Attention": "MultiHeadAttention Attention KeyValueCache",
        "Positional encodings": "LearnedPositions SinusoidalPositions Rotary LinearScaling NTKScaling "
        "DynamicNTKScaling YaRNScaling Llama3Scaling RelativeBias",
        "Recurrent cells": "RNNCell GRUCell LSTMCell MGUCell ConvLSTMCell Stacked Bidirectional ForgetBias",
        "Mixture of experts and state-space models": "MoE Mamba",
        "Low-rank adaptation": "LoRA merge_lora",
        "Quantization": "quantize QuantizedLinear",
        "PyTorch state dicts": "from_torch to_torch",
    },
    "ops": {
        "Losses": "softmax_cross_entropy linear_cross_entropy tied_cross_entropy ctc_loss",
        "Activations": "softmax gelu exact_gelu glu prelu quick_gelu squared_relu snake soft_cap",
        "Linear maps and embeddings": "linear embedding embedding_bag tied_logits",
        "Convolution": "conv conv_transpose patches pad",
        "Pooling": "max_pool mean_pool pool global_pool adaptive_pool",
        "Upsampling": "upsample pixel_shuffle pixel_unshuffle",
        "Normalization": "batch_norm batch_statistics layer_norm rms_norm residual_layer_norm residual_rms_norm "
        "group_norm local_response_norm weight_norm spectral_norm mean kernel_backend",
        "Dropout": "dropout alpha_dropout",
        "Attention": "attention attention_weights attention_backend",
        "Positional encodings": "rotary rotary_frequencies linear_frequencies ntk_frequencies dynamic_ntk_frequencies "
        "yarn_frequencies llama3_frequencies sinusoids alibi alibi_slopes relative_bias relative_buckets",
        "Recurrent cells": "gru lstm lstm_memory lstm_output blend",
        "Mixture of experts": "route dispatch combine",
        "State-space models": "selective_scan causal_filter",
        "Quantization": "quantize dequantize quantized_linear",
    },
    "dtypes": {
        "Mixed precision": "mixed_bfloat16 mixed_float16 Mixed cast",
        "Auditing dtypes": "audit check DtypeViolation DtypeError",
    },
    "optim": {
        "Adam and its variants": "AdamW Adam NAdamW NAdam RAdam AMSGrad Adamax AdaBelief AdEMAMix ADOPT Adan Yogi LAMB "
        "Adafactor",
        "SGD and its variants": "SGD RMSProp Adagrad Adadelta LARS Lion SignSGD Rprop",
        "Matrix and second-order optimizers": "Muon SOAP SophiaG GaLore LBFGS",
        "Optimizers without a schedule or a learning rate": "ScheduleFree ScheduleFreeSGD Prodigy",
        "Clipping gradients": "ClipGlobalNorm ClipNorm ClipValue ClipAdaptive",
        "Decay, parameter groups and freezing": "Decay Groups Rates LayerwiseRates Freeze",
        "Averaging weights": "Average Lookahead",
        "Other wrappers": "Accumulate SkipNonFinite Plateau SAM GradientNoise",
        "Schedules": "WarmupCosine Cosine LinearSchedule WarmupStableDecay OneCycle InverseSqrt Exponential Polynomial "
        "PiecewiseConstant PiecewiseLinear Cyclic ConstantSchedule Warmup WarmRestarts JoinedSchedules ScaledSchedule "
        "FunctionSchedule Schedule",
        "Low-precision weights": "MasterWeights KahanSummation StochasticRounding RoundToNearest Rounding",
        "Optax": "from_optax to_optax FromOptax",
        "Writing an optimizer": "Optimizer Leafwise OptimizerWrapper OptimizerState Slot Packing",
        "Types of hyperparameters": "Rate Beta Positive NonNegative Count PositiveCount",
    },
    "place": {
        "Built-in plans": "single data fsdp zero tensor sequence expert pipeline auto",
        "Plans and rules": "Plan Description Placement host shard_largest_axis shard_last_axes",
        "Placing parts of a model": "On Stream ShardingConstraint AllGatherWeights ExpertAllToAll",
        "Pipelines": "PipelineConfig Pipelined pipeline_repeats one_forward_one_backward",
        "Several processes": "initialize_distributed ProcessInfo",
        "Checks and errors": "guard check_shardings UnplannedTransfer NotEnoughMemory",
    },
    "train": {
        "The training step": "step Step TrainState",
        "The training loop": "fit Fitted Evaluation Maximize Minimize enable_compilation_cache keep_freed_memory",
        "Metrics": "accuracy F1 Precision Recall ConfusionMatrix AUC Perplexity Metric MetricSums",
        "Loggers and curves": "TensorBoard JSONLines WandB Logger Metrics plot_curves heartbeat",
        "Feeds": "Feed Source ExampleSource IterableFeed Buckets PackedSequences pack_sequences BatchIterator Position",
        "Checkpoints": "Checkpoints RestoredCheckpoint from_orbax to_orbax",
        "Loss scaling and differential privacy": "DynamicLossScale StaticLossScale LossScale DifferentialPrivacy",
        "Errors": "Diverged RetraceError",
    },
    "inspect": {
        "Summary of a model": "summary Summary LayerSummary",
        "Report": "report",
        "NaN and infinity": "nonfinite NonFinite Statistics",
        "Compilation stages": "stages Stages Donation Constant Match",
        "Cost and roofline": "cost Cost LayerCost Peaks",
        "Memory": "memory Memory LiveBuffers Moment",
        "Comparison": "compare Comparison LayerDifference dtypes Dtypes LayerDtypes",
        "Recompilation": "retrace Retraced Compilation ArgumentChange",
        "FLOPs": "flops",
        "Transfers": "transfers Transfers Transfer",
    },
    "zoo": {
        "Language models": "GPT2 gpt2 T5 t5 LSTMLanguageModel lstm_lm",
        "Llama and its relatives": "Llama llama mistral qwen2 qwen3 gemma gemma2 gemma3 mixtral phi3",
        "Image classifiers": "ResNet resnet ConvNeXt convnext ViT vit deit resize_positions normalize_images",
        "Diffusion": "UNet unet VAE vae Diffusion ddpm ddim",
        "Text generation": "stream beam_search Generated generate Greedy Sample decoder decoding_backend",
        "Text encoders": "BERT BERTMaskedLM BERTClassifier bert roberta minilm SentenceEncoder",
        "Tokenizers": "load_tokenizer Tokenizer ByteTokenizer EncodedPairs",
        "Serving": "Batcher speculative_generate Speculated",
        "Weights": "load save load_weights state_dict Loaded WeightMap Weight",
        "Weight maps": "map_linear map_conv map_norm map_batch_norm map_embed",
        "Configurations": "bert_from_config gpt2_from_config llama_from_config t5_from_config "
        "unet_from_config vae_from_config",
        "Configurations of image classifiers": "convnext_from_config resnet_from_config vit_from_config",
    },
    "files": {"Files": "save load load_torch metadata", "Errors": "InvalidFile NotEnoughSpace"},
}
