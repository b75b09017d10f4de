"""What llmc.Trainer takes beside its own arguments. dev/tools/trainer_options.py makes this file from
the table of ./train_gpt2."""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

Text = str | PathLike[str] | Sequence[object]  # of a sequence commas divide the parts

class Options(TypedDict, total=False):
    # input and output
    train_data: Text | None
    """Token shards: a file, a quoted glob, or a mixture 'a/*.bin:0.7,b/*.bin:0.3'. Default:
    dev/data/tinyshakespeare/tiny_shakespeare_train.bin."""
    output: Text | None
    """Folder of the log and the checkpoints ('': console only). Default: none."""
    tokenizer: Text | None
    """tokenizer.bin for samples ('': the one beside the training data, or gpt2_tokenizer.bin). Default: none."""
    force: int | None
    """1: train on data of another tokenizer than the model's. Default: 0."""
    # batch and length of the run
    batch_size: int | None
    """Sequences in a micro-step of one rank (B). Default: 4."""
    seq_len: int | None
    """Tokens in a sequence (T); generate without it: the model's context. Default: 1024."""
    total_batch: int | None
    """Tokens in an optimiser step (-1: those of one micro-step). Default: -1."""
    max_steps: int | None
    """Optimiser steps to run (-1: those of epochs). Default: -1."""
    pack: Literal["auto", "no", "whole", "cut"] | None
    """Rows of the data: no: cut from the stream of documents; whole: documents, packed into rows with padding; cut: the
    same, and those longer than a row are cut first; auto: whole for conversations, else no. Default: auto."""
    documents: int | None
    """1: a token sees its own document alone, from the last end-of-text token on (-1: 1 for conversations, else 0).
    Default: -1."""
    window: int | None
    """A token sees the last N tokens alone, itself among them (-1: the model's, else all). Default: -1."""
    seed: int | None
    """Seed of weights, data order and samples. Default: 1337."""
    # optimiser
    recipe: Literal["model", "none"] | None
    """Options that are not given: model: as the recipe of a preset has them, if it has one (modern); none: by their
    defaults. Default: model."""
    learning_rate: float | None
    """Largest learning rate. Default: 0.0003."""
    weight_decay: float | None
    """Decoupled weight decay, on matrices only. Default: 0.0."""
    grad_clip: float | None
    """Largest global gradient norm (0: no clipping). Default: 1.0."""
    beta1: float | None
    """AdamW beta1. Default: 0.9."""
    beta2: float | None
    """AdamW beta2. Default: 0.95."""
    adam_eps: float | None
    """AdamW epsilon. Default: 1e-08."""
    optimizer: Literal["adamw", "muon"] | None
    """Optimiser of the blocks' matrices: adamw, or muon, which orthogonalises their momentum; embeddings, head and
    vectors always have AdamW. Default: adamw."""
    lr_matrix: float | None
    """Largest learning rate of the blocks' matrices (-1: learning_rate, with muon 0.02). Default: -1.0."""
    lr_embedding: float | None
    """Of the embeddings (-1: learning_rate). Default: -1.0."""
    lr_head: float | None
    """Of a head that is not tied to the embedding (-1: learning_rate). Default: -1.0."""
    decay_matrix: float | None
    """Weight decay of the blocks' matrices (-1: weight_decay). Default: -1.0."""
    decay_vector: float | None
    """Weight decay of norms and biases. Default: 0.0."""
    ema: float | None
    """Keep an average of the weights, avg = F avg + (1 - F) w a step: the checkpoint's folder ema (0: none). Default:
    0.0."""
    skip_loss_z: float | None
    """Skip an update whose loss is this many standard deviations above the last 128 (0: off). Default: 0.0."""
    skip_norm_z: float | None
    """The same for the gradient norm. Default: 0.0."""
    on_nan: Literal["stop", "skip"] | None
    """Loss or gradient norm is not finite: stop, or skip the update (10 in a row, or 100 in all, stop the run).
    Default: stop."""
    # adapters
    lora: int | None
    """Rank of adapters that train beside a model folder's frozen weights (0: none). Default: 0."""
    lora_alpha: float | None
    """Adapters add alpha / rank of their product (-1: 2 * lora). Default: -1.0."""
    lora_targets: Text | None
    """Which matrices of blocks have adapters: all, or peft's names with commas between (q_proj,v_proj). Default:
    all."""
    # evaluation and samples
    cache_dtype: Literal["native", "fp8"] | None
    """What keys and values of earlier tokens are kept in: native (the dtype of the build), or fp8 (e4m3, a scale for
    each row of a head). Default: native."""
    # checkpoints (need --output)
    save_keep: int | None
    """Keep the newest K checkpoints (0: all). Default: 0."""
    save_major: int | None
    """Never remove checkpoints of every N-th step (0: off). Default: 0."""
    resume: int | None
    """1: go on from output's newest checkpoint, with its options unless others are given. Default: 0."""
    reset_optimizer: int | None
    """1: with resume 1, take the checkpoint's weights and place in the data, and begin with empty optimiser states.
    Default: 0."""
    # numbers and memory
    matmul_dtype: Literal["native", "bf16", "fp8", "fp8-dw-bf16"] | None
    """What the blocks' matmuls multiply: native (the dtype of the build), bf16, fp8 (e4m3, scaled), or fp8-dw-bf16
    (gradients of weights in bf16). Default: native."""
    weights: Literal["native", "bf16", "int8", "int4", "fp8"] | None
    """How generate and evaluate store the matrices of blocks and head, and lora those that it freezes: native (the
    dtype of the build), bf16, int8 or fp8 (a scale for each row), int4 (a scale for each 128). Default: native."""
    head_dtype: Literal["native", "fp8"] | None
    """What the LM head's logits are a product of: native, or fp8 with any matmul_dtype; its gradients stay native.
    Default: native."""
    master_weights: int | None
    """Keep an fp32 copy of bf16 weights; 0: stochastic rounding instead. Default: 1."""
    state_dtype: Literal["fp32", "bf16"] | None
    """AdamW's m and v: fp32, or bf16 with stochastic rounding. Default: fp32."""
    grad_dtype: Literal["fp32", "bf16"] | None
    """Sums of gradients over micro-steps: fp32 (4 bytes a parameter more), or bf16. Default: fp32."""
    recompute: int | None
    """Less memory, more time: 1 recomputes activation functions, 2 norms, too, 3 blocks (-1: what a GPU's memory asks
    for, with offload). Default: -1."""
    head_chunks: int | None
    """Parts of the LM head: 1/N of the logits in memory (0: 1 on a GPU, parts of 256 MiB on a CPU). Default: 0."""
    offload: Text | None
    """What a GPU keeps in host memory: states (m and v), master, activations (needs recompute 3), with commas between.
    Default: none."""
    memory: float | None
    """GiB of a GPU that the run may take (0: what is free). Default: 0.0."""
    # processes
    threads: int | None
    """CPU threads of a rank (0: OMP_NUM_THREADS or all cores). Default: 0."""
    timeout: float | None
    """Seconds without progress after which every rank reports and ends (0: never); 4 times that in the first step.
    Default: 300.0."""
    zero_stage: int | None
    """Shard over ranks: 1 optimiser states, 2 and blocks' gradients, 3 and blocks' weights (bitwise identical, but 2
    and 3 with several micro-steps). Default: 0."""
    tp: int | None
    """Tensor parallelism: N neighbouring ranks share one model. Default: 1."""
