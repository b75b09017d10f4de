"""PyTorch's kernels for what our ladders time, timed as they do it: each run finds a cold L2, the median counts.

Attention is cuDNN's and FlashAttention-2's, through scaled_dot_product_attention. Where PyTorch has no kernel of its
own for what ours does in one go, the formula is compiled; what cannot be compiled, or no longer within COMPILE_SECONDS,
is timed kernel by kernel, and the name then lacks "compiled". dev/bench/kernels.py asks for names and sizes as a ladder
prints them.
"""

import functools
import gc
import re
import time
import warnings
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

DEVICE = "cuda"
FLUSH_BYTES = 256 << 20  # five times the L2 of an H200
RUNS, LEAST_RUNS, RUNS_MS = 25, 5, 100
WAIT_CYCLES, MOST_WAIT_CYCLES = 1 << 18, 1 << 25  # some 0.1 ms and 17 ms
COMPILE_SECONDS = 100  # in all

dtype = torch.bfloat16  # floatX of the ladders
compile_seconds = 0.0
PEERS = []  # (what the ladder calls it, the vendor's name, a function of the sizes that gives what is to be timed)


def peer(pattern, vendor="PyTorch"):
    """Of a function f(s, compiled, *groups): s has the sizes, `compiled` compiles a function, groups are the
    pattern's."""

    def add(f):
        PEERS.append((re.compile(pattern), vendor, f))
        return f

    return add


class NoCounterpart(Exception):
    pass


def normal(*shape, std=1.0, kind=None):
    return torch.randn(*shape, dtype=kind or dtype, device=DEVICE).mul_(std)


def backward(outputs, inputs):
    """A function that computes the inputs' gradients, from random ones of the outputs."""
    gradients = [torch.randn_like(o) for o in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


# ---- what each ladder has


def rotation(s):
    """A function that rotates heads, (B, T, heads, HD)."""
    angles = torch.rand(s.T, 1, s.HD // 2, device=DEVICE)
    cos, sin = angles.cos(), angles.sin()

    def rotate(x):
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    return rotate


def in_fixed_order(f):
    """f, with the algorithms whose results repeat."""

    def run():
        torch.use_deterministic_algorithms(True)
        # or new tensors are filled with NaN, in the time measured
        torch.utils.deterministic.fill_uninitialized_memory = False
        try:
            return f()
        finally:
            torch.use_deterministic_algorithms(False)

    return run


def attention(s, compiled, way, rotated, backend):
    q, k, v = (normal(s.B, s.T, heads, s.HD).requires_grad_() for heads in (s.NH, s.NKV, s.NKV))
    rotate = compiled(rotation(s)) if rotated else lambda x: x

    def forward():
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                rotate(q).transpose(1, 2),
                rotate(k).transpose(1, 2),
                v.transpose(1, 2),
                is_causal=True,
                enable_gqa=s.NKV != s.NH,
            )

    return forward if way == "forward" else backward([forward()], [q, k, v])


for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FlashAttention-2", SDPBackend.FLASH_ATTENTION)):
    peer(r"attention \S+ (forward|backward)(, rotated)?", name)(functools.partial(attention, backend=backend))


@peer(r"attention \S+ backward", "FlashAttention-2 in a fixed order")  # cuDNN's repeats its bits neither way
def attention_repeated(s, compiled):
    return in_fixed_order(attention(s, compiled, "backward", None, SDPBackend.FLASH_ATTENTION))


@peer(r"attention_rows one token")
def decode(s, compiled):
    q, k, v = normal(s.S, s.NH, 1, s.HD), normal(s.S, s.NKV, s.T, s.HD), normal(s.S, s.NKV, s.T, s.HD)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=s.NKV != s.NH)


@peer(r"matmul dbias")
def bias_gradient(s, compiled):
    dout = normal(s.N, s.OC)
    return lambda: dout.sum(0)


@peer(r"matmul_rows product", "PyTorch in bf16, no activation")
def product_of_rows(s, compiled):
    a, weight = normal(s.rows, s.K), normal(s.N, s.K)
    return lambda: F.linear(a, weight)


@peer(r"matmul_rows products", "PyTorch in bf16, no activation, no norm")
def products_of_rows(s, compiled):
    shapes = (s.QKV, s.C), (s.C, s.C), (2 * s.F, s.C), (s.C, s.F)
    weights = [normal(*shape) for _ in range(6) for shape in shapes]
    a = {width: normal(s.rows, width) for width in (s.C, s.F)}
    return lambda: [F.linear(a[w.shape[1]], w) for w in weights]


@peer(r"activation gelu (forward|backward)(?: in place| with slopes)?")
def gelu(s, compiled, way):
    x, dout = normal(s.N, s.F), normal(s.N, s.F)
    return (
        (lambda: F.gelu(x, approximate="tanh"))
        if way == "forward"
        else lambda: torch.ops.aten.gelu_backward(dout, x, approximate="tanh")
    )


@peer(r"activation swiglu (forward|backward)(?: with slopes)?")
def swiglu(s, compiled, way):
    @compiled
    def f(x):
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    x = normal(s.N, 2 * s.F).requires_grad_()
    return (lambda: f(x)) if way == "forward" else backward([f(x)], [x])


def normalise(kind, x, weight, bias):
    return (
        F.layer_norm(x, weight.shape, weight, bias)
        if kind == "LayerNorm"
        else F.rms_norm(x, weight.shape, weight, 1e-5)
    )


@peer(r"norm (LayerNorm|RMSNorm) forward")
def norm(s, compiled, kind):
    x, weight, bias = normal(s.N, s.C).requires_grad_(), normal(s.C), normal(s.C)
    return lambda: normalise(kind, x, weight, bias)


# Ours adds the gradient of the norm to that of the residual sum: one pass in a compiled function too.
@peer(r"norm (LayerNorm|RMSNorm) (forward with residual|backward|backward with column sums)")
def residual_norm(s, compiled, kind, what):
    a, b, weight, bias, below = (
        normal(*size).requires_grad_() for size in ((s.N, s.C), (s.N, s.C), (s.C,), (s.C,), (s.C,))
    )

    @compiled
    def f(a, b, weight, bias, below):
        residual = a + (b + below if "below" in what else b)
        return residual, normalise(kind, residual, weight, bias)

    if "forward" in what:
        return lambda: f(a, b, weight, bias, below)
    return backward(
        f(a, b, weight, bias, below), [a, weight] + [bias] * (kind == "LayerNorm") + [below] * ("below" in what)
    )


@peer(r"rope (forward|backward)")
def rope(s, compiled, way):
    f = compiled(rotation(s))
    x = normal(s.B, s.T, s.NH + s.NKV, s.HD).requires_grad_()
    return (lambda: f(x)) if way == "forward" else backward([f(x)], [x])


@peer(r"qk_norm (forward|backward)")
def qk_norm(s, compiled, way):
    rotate = rotation(s)
    f = compiled(lambda x, gains: rotate(F.rms_norm(x, (s.HD,), gains)))
    x, gains = normal(s.B, s.T, s.NH + s.NKV, s.HD).requires_grad_(), normal(s.HD).requires_grad_()
    return (lambda: f(x, gains)) if way == "forward" else backward([f(x, gains)], [x, gains])


@peer(r"(rope|qk_norm) q, k, v product, (?:then forward|rotated|normalised)")
def rotated_product(s, compiled, kernel):
    turn = rotation(s)
    rotate = turn if kernel == "rope" else lambda x: turn(F.rms_norm(x, (s.HD,)))

    @compiled
    def f(x, weight):
        qkv = F.linear(x, weight).unflatten(-1, (-1, s.HD))
        return torch.cat((rotate(qkv[:, :, : s.NH + s.NKV]), qkv[:, :, s.NH + s.NKV :]), 2)

    x, weight = normal(s.B, s.T, s.C), normal((s.NH + 2 * s.NKV) * s.HD, s.C)
    return lambda: f(x, weight)


@peer(r"classifier (forward only|forward and dlogits|forward and dlogits, softcap)")
def classifier(s, compiled, what):
    @compiled
    def f(logits, targets):
        x = logits.float()
        x = 15 * x * torch.rsqrt(x * x + 225) if "softcap" in what else x
        return F.cross_entropy(x, targets, reduction="sum")

    logits, targets = normal(s.N, s.Vp).requires_grad_(), torch.randint(0, s.V, (s.N,), device=DEVICE)
    return (
        (lambda: f(logits, targets))
        if what == "forward only"
        else lambda: torch.autograd.grad(f(logits, targets), logits)
    )


@peer(r"classifier loss_sum")
def loss_sum(s, compiled):
    losses = normal(s.N, kind=torch.float32)
    return lambda: losses.sum()


@peer(r"embedding (forward|backward)")
def embedding(s, compiled, way):
    if s.skew > 0:  # as in text: frequencies of about 1/rank
        tokens = ((s.Vp ** torch.rand(s.B, s.T, device=DEVICE, dtype=torch.float64)).long() - 1) * 7919 % s.Vp
    else:
        tokens = (
            torch.randint(0, s.Vp, (s.B, s.T), device=DEVICE)
            if s.skew == 0
            else torch.full((s.B, s.T), s.Vp - 1, device=DEVICE)
        )
    wte, wpe = (normal(rows, s.C, std=0.02).requires_grad_() for rows in (s.Vp, s.T))

    def forward():
        return F.embedding(tokens, wte) + wpe if s.positions else F.embedding(tokens, wte)

    return forward if way == "forward" else backward([forward()], [wte, wpe] if s.positions else [wte])


@peer(r"global_norm sum of squares")
def global_norm(s, compiled):
    gradients = normal(s.n, std=1e-3)
    return lambda: torch.linalg.vector_norm(gradients, dtype=torch.float32)


@peer(r"tp sum of parts")
def sum_of_parts(s, compiled):
    parts, bias = normal(s.ranks, s.rows, s.C), normal(s.C)
    return lambda: torch.sum(parts, 0).add_(bias)


@peer(r"adamw update", "PyTorch, fused")
def adamw(s, compiled):
    kind = torch.float32 if s.master else dtype
    if kind.itemsize != s.state_bytes:
        raise NoCounterpart("its states have the weights' type")
    weights = normal(s.n, std=0.02, kind=kind).requires_grad_()
    weights.grad = normal(s.n, std=1e-3, kind=kind)
    return torch.optim.AdamW([weights], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True).step


# ---- timing


def time_us(run):
    """Median over runs, each after 256 MiB were written. Before each the GPU waits until the host has queued
    all of it: no longer than that needs, so that it does not cool down."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    wait, us, runs, done = WAIT_CYCLES, [], RUNS, -3  # three to warm up
    while done < runs:
        torch.cuda._sleep(wait)
        flush.fill_(done & 0xFF)
        begin.record()
        run()
        end.record()
        late = begin.query()
        end.synchronize()
        if done >= 0 and late and wait < MOST_WAIT_CYCLES:
            wait *= 2
            continue
        done += 1
        if done > 0:
            us.append(begin.elapsed_time(end) * 1e3)
        elif done == 0:
            runs = min(RUNS, max(LEAST_RUNS, int(RUNS_MS / max(begin.elapsed_time(end), 1e-3))))
    return sorted(us)[len(us) // 2]


def reason(error, said):
    """The error's first line, and what PyTorch warned of before: of attention it says only there why a backend
    cannot."""
    texts = [f"{error}".strip() or type(error).__name__] + (
        [f"{w.message}" for w in said] if "No available kernel" in f"{error}" else []
    )
    return "; ".join(
        dict.fromkeys(re.sub(r" \(Triggered internally.*", "", text.splitlines()[0])[:120] for text in texts)
    )


def time_one(make, sizes, groups, compiling):
    """Microseconds, and whether something was compiled."""
    compiled = []

    def wrap(f):
        if not compiling:
            return f
        compiled.append(f)
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # a backward pass is run several times
        return torch.compile(f, dynamic=False)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return time_us(make(SimpleNamespace(**sizes), wrap, *groups)), bool(compiled), None
        except Exception as error:  # no such kernel here, no memory, no compiler: said in the table
            return None, bool(compiled), reason(error, said)
        finally:
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()


@functools.lru_cache(None)
def time_peer(make, sizes, groups):
    """(microseconds or None, compiled, why not)"""
    global compile_seconds
    begin = time.time()
    us, compiled, why = time_one(make, dict(sizes), groups, compile_seconds < COMPILE_SECONDS)
    if compiled:
        compile_seconds += time.time() - begin
        if why:
            us, compiled, still = time_one(make, dict(sizes), groups, False)
            why = still or f"not compiled: {why}"
    return us, compiled, why


def time_peers(kernel, sizes):
    """({vendor: microseconds}, [why not]) for what a ladder calls `kernel`."""
    times, notes = {}, []
    for pattern, vendor, make in PEERS:
        match = pattern.fullmatch(kernel)
        if match:
            us, compiled, why = time_peer(make, tuple(sorted(sizes.items())), match.groups())
            if us:
                times[vendor + ", compiled" * compiled] = us
            if why:
                notes.append(f"{vendor}: {why}")
    return times, notes


def about():
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return f"PyTorch {torch.__version__}" + (
        f", cuDNN {version // 10000}.{version // 100 % 100}.{version % 100}" if version else ""
    )
