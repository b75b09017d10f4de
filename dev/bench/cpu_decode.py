"""How fast does ./train_gpt2 generate on this CPU, beside what its memory gives, PyTorch and llama.cpp?

    .venv/bin/python dev/bench/cpu_decode.py [--rounds 3] [--tokens 128] [--only native,int8,torch]

GPT-2 124M with random weights, one sequence, the likeliest token, as many threads as cores. Each round runs all after
each other, so that a busy machine slows all; the best of each is printed. `read` is a loop that only reads as many
bytes as the weights of the blocks and of the head have. PyTorch: a cache of fixed size, under torch.compile. llama.cpp:
if the Python packages xllamacpp and gguf are there.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from llmc.tool_output import end_with_reader  # noqa: E402

L, NH, C, V, T = 12, 12, 768, 50257, 1024
WEIGHTS = L * 12 * C * C + V * C
BYTES = {"native": 4, "bf16": 2, "int8": 1, "fp8": 1, "int4": 0.5 + 2 / 128}
READ = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <omp.h>
typedef float Vector __attribute__((vector_size(64)));
static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}
int main(int argc, char **argv) {
    (void)argc;
    size_t n = atoll(argv[1]) / 4096 * 4096, threads = omp_get_max_threads();
    char *p = aligned_alloc(1 << 21, (n >> 21 << 21) + (1 << 21));
    double best = 1e9;
    madvise(p, n, MADV_HUGEPAGE);
    memset(p, 1, n);
    for (int i = 0; i < 50; i++) {
        double begin = now();
        #pragma omp parallel
        {
            size_t t = omp_get_thread_num(), at = n / threads * t, end = n / threads * (t + 1);
            Vector s[8] = {0};
            for (; at + sizeof s <= end; at += sizeof s)
                for (int k = 0; k < 8; k++) s[k] += ((Vector *)(p + at))[k];
            for (int k = 0; k < 8; k++) __asm__ volatile("" : : "m"(s[k]));
        }
        if (now() - begin < best) best = now() - begin;
    }
    printf("%g\\n", 1 / best);
}
"""


def ours(weights, tokens, folder):
    command = [ROOT / "train_gpt2", "-e", "d12", "--generate", "-g", tokens, "--temperature", 0, "--weights", weights]
    said = subprocess.run([str(w) for w in command], capture_output=True, text=True, check=True, cwd=folder).stdout
    return float(re.search(r"([\d.]+) tokens/s; prompt", said)[1])


def read(weights, tokens, folder):
    program = folder / "read"
    if not program.exists():
        command = ["gcc", "-O3", "-march=native", "-fopenmp", "-x", "c", "-", "-o", program]
        subprocess.run(command, input=READ, text=True, check=True)
    return float(subprocess.check_output([program, str(int(WEIGHTS * BYTES[weights]))]))


def torch_decode(dtype, tokens):
    """Runs in a process of its own and prints tokens/s."""
    import torch
    import torch.nn.functional as F

    torch.set_grad_enabled(False)
    kind = {"native": torch.float32, "bf16": torch.bfloat16}[dtype]
    new = lambda *shape: torch.randn(*shape).mul_(0.02).to(kind)  # noqa: E731
    wte, wpe = new(V, C), new(T, C)
    shapes = ((3 * C, C), (3 * C,), (C, C), (C,), (4 * C, C), (4 * C,), (C, 4 * C), (C,))
    blocks = [[new(*s) for s in shapes] for _ in range(L)]
    ones, zeros, room = torch.ones(C, dtype=kind), torch.zeros(C, dtype=kind), tokens + 16
    keys, values = (torch.zeros(L, 1, NH, room, C // NH, dtype=kind) for _ in range(2))
    norm = lambda x: F.layer_norm(x, (C,), ones, zeros)  # noqa: E731

    def step(token, at, mask):
        x = wte[token] + wpe[at]
        for i, (qkv, qkv_bias, proj, proj_bias, fc, fc_bias, fcproj, fcproj_bias) in enumerate(blocks):
            q, k, v = F.linear(norm(x), qkv, qkv_bias).view(1, 1, 3, NH, C // NH).transpose(1, 3).unbind(2)
            keys[i].index_copy_(2, at, k)
            values[i].index_copy_(2, at, v)
            y = F.scaled_dot_product_attention(q, keys[i], values[i], attn_mask=mask)
            x = x + F.linear(y.transpose(1, 2).reshape(1, C), proj, proj_bias)
            x = x + F.linear(F.gelu(F.linear(norm(x), fc, fc_bias), approximate="tanh"), fcproj, fcproj_bias)
        return F.linear(norm(x), wte).argmax(-1)

    causal = torch.tril(torch.ones(room, room, dtype=torch.bool))
    run, token, begin = torch.compile(step), torch.zeros(1, dtype=torch.long), 0
    for i in range(room):
        if i == 16:
            begin = time.perf_counter()
        token = run(token, torch.tensor([i]), causal[i : i + 1])
    print(json.dumps(tokens / (time.perf_counter() - begin)))


def pytorch(dtype, tokens, folder):
    command = [sys.executable, __file__, "--torch", dtype, "--tokens", str(tokens)]
    return float(subprocess.check_output(command, cwd=folder).splitlines()[-1])


def write_gguf(path, kind):
    import gguf
    import numpy as np

    type_ = {"native": "F32", "bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[kind]
    w, random = gguf.GGUFWriter(path, "gpt2"), np.random.default_rng(0)

    def add(name, *shape):
        x = random.standard_normal(shape, np.float32) * 0.02
        if len(shape) == 1 or name.startswith("position"):
            return w.add_tensor(name, x)
        quant = gguf.GGMLQuantizationType[type_]
        return w.add_tensor(name, gguf.quants.quantize(x, quant), raw_dtype=quant)

    w.add_context_length(T)
    w.add_embedding_length(C)
    w.add_block_count(L)
    w.add_feed_forward_length(4 * C)
    w.add_head_count(NH)
    w.add_layer_norm_eps(1e-5)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("gpt-2")
    w.add_token_list([f"t{i}" for i in range(V)])
    w.add_token_types([1] * V)
    w.add_token_merges(["t 1"])
    w.add_bos_token_id(0)
    w.add_eos_token_id(0)
    add("token_embd.weight", V, C)
    add("position_embd.weight", T, C)
    add("output_norm.weight", C), add("output_norm.bias", C)
    sizes = {"attn_norm": (C,), "attn_qkv": (3 * C, C), "attn_output": (C, C), "ffn_norm": (C,)}
    sizes |= {"ffn_up": (4 * C, C), "ffn_down": (C, 4 * C)}
    for i in range(L):
        for name, shape in sizes.items():
            add(f"blk.{i}.{name}.weight", *shape)
            add(f"blk.{i}.{name}.bias", shape[0])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def llama_decode(path, tokens):
    """Runs in a process of its own and prints tokens/s."""
    import xllamacpp

    p = xllamacpp.CommonParams()
    p.model.path = path
    p.n_ctx = T
    p.cpuparams.n_threads = os.cpu_count()
    p.warmup = True
    server = xllamacpp.Server(p)
    done = server.handle_completions({"prompt": [0, 1, 2], "n_predict": tokens, "ignore_eos": True, "temperature": 0})
    done = done[0] if isinstance(done, (list, tuple)) else done
    print(json.dumps(done["timings"]["predicted_per_second"]))
    sys.stdout.flush()
    os._exit(0)


def llama(kind, tokens, folder):
    path = folder / f"{kind}.gguf"
    if not path.exists():
        write_gguf(path, kind)
    command = [sys.executable, __file__, "--llama", path, "--tokens", str(tokens)]
    return float(subprocess.run(command, capture_output=True, check=True, cwd=folder).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", default="", help="names of rows and columns, with commas")
    parser.add_argument("--torch", default="", help=argparse.SUPPRESS)
    parser.add_argument("--llama", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch:
        return torch_decode(args.torch, args.tokens)
    if args.llama:
        return llama_decode(args.llama, args.tokens)
    who = {"read": (read, list(BYTES)), "llm.cu": (ours, list(BYTES)), "torch": (pytorch, ["native", "bf16"])}
    who["llama.cpp"] = (llama, ["native", "bf16", "int8", "int4"])
    only, best, failed = set(filter(None, args.only.split(","))), {}, set()
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            for name, (f, kinds) in who.items():
                for kind in kinds:
                    if name in failed or (only and (kind not in only or name not in only)):
                        continue
                    try:
                        best[name, kind] = max(best.get((name, kind), 0), f(kind, args.tokens, Path(folder)))
                    except (ImportError, subprocess.CalledProcessError) as e:
                        print(f"{name} is left out: {e}")
                        failed.add(name)
    print(f"tokens/s, {os.cpu_count()} cores   " + "".join(f"{name:>12}" for name in who) + "   llm.cu / read")
    for kind in BYTES:
        row = [best.get((name, kind), float("nan")) for name in who]
        print(f"{kind:22}" + "".join(f"{x:12.1f}" for x in row) + f"{row[1] / row[0]:16.2f}")


if __name__ == "__main__":
    end_with_reader()
    main()
