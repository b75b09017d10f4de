"""The pictures of doc/step.md: a batch's way through a model, and a gradient's.

  python dev/draw_step.py                  writes doc/step_batch.png and doc/step_gradient.png

Calls have the names that they have in train_gpt2.cu.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from llmc import missing_package  # noqa: E402,F401, before matplotlib
from llmc.tool_output import Parser, end_with_reader  # noqa: E402

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Circle, FancyBboxPatch

DOC = Path(__file__).resolve().parents[2] / "doc"
LINEAR, OTHER, HEAD, RANKS = "#dcebf7", "#eeeeee", "#f7e6d2", "#e0f0e2"  # boxes
STREAM, GRADIENT, KEPT, INK, FAINT = "#1f6fb4", "#c0392b", "#2e8b57", "#222222", "#777777"  # lines and words
WIDTH, INCHES = 100, 0.11  # units across a picture, and inches of a unit


class Picture:
    def __init__(self, height):
        self.figure = plt.figure(figsize=(INCHES * WIDTH, INCHES * height))
        self.axes = self.figure.add_axes([0, 0, 1, 1], xlim=(0, WIDTH), ylim=(0, height))
        self.axes.axis("off")

    def text(self, x, y, words, size=9.0, colour=INK, **more):
        style = {"size": size, "color": colour, "ha": "center", "va": "center", "linespacing": 1.3}
        self.axes.text(x, y, words, **(style | more))

    def note(self, x, y, words):
        self.text(x, y, words, 8, FAINT)

    def rectangle(self, x, y, width, height, rounding, colour, edge, layer):
        shape = FancyBboxPatch((x, y), width, height, boxstyle=f"round,pad=0,rounding_size={rounding}")
        shape.set(facecolor=colour, edgecolor=edge, linewidth=0.8, zorder=layer)
        self.axes.add_patch(shape)

    def box(self, x, y, words, call="", width=9.0, height=5.0, colour=LINEAR):
        """Around (x, y): what it is, and below it the call."""
        self.rectangle(x - width / 2, y - height / 2, width, height, 0.6, colour, "#666666", 1)
        self.text(x, y + 0.9 * len(call.splitlines()), words, 9.5, weight="bold")
        self.text(x, y - 1.2, call, 7.5, family="monospace")

    def panel(self, bottom, top, title):
        self.rectangle(0.6, bottom, WIDTH - 1.2, top - bottom, 1, "#fbfbfb", "#cccccc", -2)
        self.text(2, top - 2, title, 10.5, ha="left", weight="bold")

    def line(self, *points, colour=INK, width=1.1, dashed=False):
        style = "--" if dashed else "-"
        self.axes.plot(*zip(*points), color=colour, linewidth=width, linestyle=style, zorder=-1)

    def arrow(self, *points, colour=INK, width=1.1, dashed=False):
        """Along straight lines from point to point."""
        if len(points) > 2:
            self.line(*points[:-1], colour=colour, width=width, dashed=dashed)
        style = {"arrowstyle": "-|>", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 8 + 2 * width}
        style |= {"color": colour, "linewidth": width, "linestyle": "--" if dashed else "-"}
        self.axes.annotate("", points[-1], points[-2], arrowprops=style, zorder=-1)

    def plus(self, x, y, colour):
        self.axes.add_patch(Circle((x, y), 0.9, facecolor="white", edgecolor=colour, linewidth=1.6))
        self.text(x, y, "+", 11, colour, va="center_baseline")

    def kept(self, x, y, words=""):
        self.axes.add_patch(Circle((x, y), 0.5, facecolor=KEPT, edgecolor="none"))
        self.text(x + 0.9, y, words, 8, KEPT, ha="left")

    def save(self, name):
        self.figure.savefig(DOC / name, dpi=120)
        plt.close(self.figure)


# ---- a batch


def batch_model(p, y):
    p.text(6, y, "tokens (B,T)\ntargets (B,T)", 9.5)
    p.box(20, y, "embedding", "embed", 10, colour=OTHER)
    p.box(35, y, "block 0", "block_forward", 11.5)
    p.text(47, y + 1.7, "…", 14)
    p.box(59, y, "block L − 1", "block_forward", 11.5)
    p.box(74, y, "final norm", "residual_norm", 11, colour=OTHER)
    p.box(87, y, "head", "head", 8, colour=HEAD)
    p.text(96.5, y, "losses\n(B,T)", 9.5)
    p.arrow((11.3, y), (15, y))
    for begin, end in ((25, 29.2), (40.7, 53.2), (64.7, 68.5)):
        p.arrow((begin, y), (end, y), colour=STREAM, width=3)
    p.text(47, y - 4.6, "residual stream: N = B · T rows of C numbers", 9, STREAM)
    p.arrow((79.5, y), (83, y))
    p.text(81.2, y + 1.5, "h")
    p.arrow((91, y), (93.8, y))
    p.arrow((6, y + 3), (6, y + 6.5), (87, y + 6.5), (87, y + 2.6), colour=FAINT)
    p.note(46, y + 7.6, "targets")


def batch_block(p, bottom):
    p.panel(bottom, bottom + 26.5, "a block")
    stream, y = bottom + 20, bottom + 11
    norm1, qkv, attention, proj, norm2, fc, fcproj = 11, 25, 39, 53, 66, 79, 92
    p.arrow((2, stream), (98, stream), colour=STREAM, width=3)
    for x, name in ((2.5, "x"), (norm2 + 3.4, "x'"), (97, "x''")):
        p.text(x, stream + 1.7, name, 10, STREAM)
    for x, name in ((norm1, "norm 1"), (norm2, "norm 2")):
        p.arrow((x, stream - 0.9), (x, y + 2.5), colour=STREAM, width=1.6)
        p.plus(x, stream, STREAM)
        p.box(x, y, name, "residual_norm", 10.5, colour=OTHER)
        p.kept(x - 4, y - 4, "mean, 1/std")
    p.box(qkv, y, "q, k, v", "linear_forward", 11)
    p.note(qkv, y - 4.4, "epilogue: bias,\nRoPE (Llama, Qwen)")
    p.box(attention, y, "attention", "attend", 11, colour=OTHER)
    p.kept(attention - 1, y - 4, "lse")
    p.box(proj, y, "projection", "linear_project", 11)
    p.note(proj, y - 4, "epilogue: bias")
    p.box(fc, y, "MLP, first", "linear_forward", 11)
    p.note(fc, y - 4.4, "epilogue: bias,\nGELU or SwiGLU")
    p.kept(72.5, y - 7.2, "slopes of the activation")
    p.box(fcproj, y, "MLP, second", "linear_project", 11)
    p.note(fcproj, y - 4, "epilogue: bias")
    for begin, end, name in (
        (norm1, qkv, "h1"),
        (qkv, attention, ""),
        (attention, proj, "y"),
        (norm2, fc, "h2"),
        (fc, fcproj, "a"),
    ):
        p.arrow((begin + 5.3, y), (end - 5.5, y))
        p.text((begin + end) / 2, y + 1.5, name)
        p.kept((begin + end) / 2 - 0.1, y)
    p.arrow((proj, y + 2.5), (proj, stream - 3), (norm2 - 1.8, stream - 3), (norm2 - 0.6, stream - 0.9))
    p.text(proj + 5, stream - 4.3, "branch", 8.5)
    p.arrow((fcproj, y + 2.5), (fcproj, stream - 3), (98.5, stream - 3), dashed=True)
    p.text(fcproj - 0.8, stream - 4.3, "branch: the next norm adds it", 8.5, ha="right")
    p.arrow((2, stream - 3), (norm1 - 1.8, stream - 3), (norm1 - 0.6, stream - 0.9), dashed=True)
    p.kept(72.5, stream)
    p.kept(95, stream)
    p.kept(2.6, bottom + 1.9, "kept for backward (--recompute keeps less)")


def batch_head(p, bottom):
    p.panel(bottom, bottom + 14, "the head, forward and at once its own backward, on N / --head-chunks rows at a time")
    y = bottom + 6
    p.arrow((1.2, y), (3.5, y))
    p.box(13, y, "logits = h Wᵀ", "linear_product", 19, colour=HEAD)
    p.arrow((22.5, y), (29.5, y))
    p.text(26, y + 1.5, "(rows, Vp)", 8)
    p.box(39, y, "losses, dlogits", "head_losses", 19, colour=HEAD)
    p.note(39, y - 4.2, "the gradient takes the place of the logits")
    p.arrow((48.5, y), (55.5, y))
    p.box(65, y, "dW = dlogitsᵀ h", "linear_product_weight", 19, colour=HEAD)
    p.arrow((74.5, y), (78.5, y))
    p.box(88, y, "dh = dlogits W", "linear_product_backward", 19, colour=HEAD)
    p.note(88, y - 4.2, "backward begins with it")


# ---- a gradient


def gradient_model(p, y):
    p.text(6.5, y, "dh,\nfrom the head", 9.5)
    p.arrow((12, y), (16.5, y))
    p.box(22, y, "final norm", "norm_gradient", 11, colour=OTHER)
    p.box(39, y, "block L − 1", "block_backward", 12)
    p.text(52, y + 1.7, "…", 14)
    p.box(65, y, "block 0", "block_backward", 12)
    p.box(84, y, "embedding", "embed_backward", 12, colour=OTHER)
    for begin, end in ((27.5, 33), (45, 59), (71, 78)):
        p.arrow((begin, y), (end, y), colour=GRADIENT, width=3)
    p.text(53.2, y - 2.3, "dx: gradient of the\nresidual stream", 8.5, GRADIENT, va="top")
    for x, unit in ((22, "L + 1"), (39, "L"), (65, "1"), (84, "0")):
        p.arrow((x, y - 2.5), (x, y - 6), colour=KEPT, width=1.4)
        p.text(x + 0.8, y - 4.4, f"release unit {unit}", 8.5, KEPT, ha="left")


def gradient_block(p, bottom):
    p.panel(bottom, bottom + 27.5, "a block: its backward, in the order of the calls")
    stream, y, weights = bottom + 21, bottom + 13.5, bottom + 5.4
    fcproj, fc, norm2, proj, attention, qkv, norm1 = 8, 22, 36, 50, 64, 78, 92
    p.arrow((1.5, stream), (98.5, stream), colour=GRADIENT, width=3)
    for x, name, call, operands in (
        (fcproj, "MLP, second", "activation", "dx, a"),
        (fc, "MLP, first", "input", "df, h2"),
        (proj, "projection", "project", "dx, y"),
        (qkv, "q, k, v", "input", "dqkv, h1"),
    ):
        p.box(x, y, name, f"linear_backward_\n{call}", 10.4, 6.2)
        p.box(x, weights, "dW, db", "", 8.4, 3, colour=RANKS)
        p.arrow((x, y - 3.1), (x, weights + 1.5))
        p.text(x + 0.8, (y - 3.1 + weights + 1.5) / 2, f"from {operands}", 8, FAINT, ha="left")
    p.box(attention, y, "attention", "attention_\nbackward", 10.4, 6.2, OTHER)
    for x, name in ((norm2, "norm 2"), (norm1, "norm 1")):
        p.box(x, y, name, "norm_gradient", 10.4, 6.2, OTHER)
        p.box(x, weights, "dweight", "", 8.4, 3, colour=RANKS)
        p.arrow((x, y - 3.1), (x, weights + 1.5))
        p.arrow((x, y + 3.1), (x, stream - 0.9), colour=GRADIENT, width=1.6)
        p.plus(x, stream, GRADIENT)
    for x in (fcproj, proj):
        p.arrow((x, stream), (x, y + 3.1), colour=GRADIENT, width=1.6)
    for begin, end, name in (
        (fcproj, fc, "df"),
        (fc, norm2, "dh2"),
        (proj, attention, "dy"),
        (attention, qkv, "dqkv"),
        (qkv, norm1, "dh1"),
    ):
        p.arrow((begin + 5.2, y), (end - 5.2, y))
        p.text((begin + end) / 2, y + 1.4, name, 8)
    p.text(
        1.8,
        bottom + 1.8,
        "A weight gradient follows the gradient of its layer's input: with --tp it hides "
        "rows that are on their way between ranks.",
        8.5,
        FAINT,
        ha="left",
    )


def gradient_unit(p, bottom):
    p.panel(bottom, bottom + 23.5, "a unit's gradients, from their release to the update")
    y = bottom + 14.5
    for x, name, call, width, colour, words in (
        (10, "sum of micro-steps", "grad_sum", 16, RANKS, "in fp32 (--grad-dtype),\nwhere there are several"),
        (31, "sum over ranks", "zero_reduce", 15, RANKS, "last micro-step alone;\nrank k gets piece k"),
        (48, "norm, loss", "queue_norm", 11, OTHER, "of all ranks"),
        (63.5, "decision", "step_decide", 12, HEAD, "on the device:\nclip factor; apply?"),
        (78, "update", "queue_adamw", 11, OTHER, "AdamW; nothing\nif the step is skipped"),
        (92.5, "weights", "zero_gather", 11, RANKS, "ZeRO 1: pieces\nto all ranks"),
    ):
        p.box(x, y, name, call, width, colour=colour)
        p.note(x, y - 4.9, words)
    p.arrow((18, y), (23.5, y), colour=KEPT, width=1.4)
    for begin, end in ((38.5, 42.5), (53.5, 57.5), (69.5, 72.5), (83.5, 87)):
        p.arrow((begin, y), (end, y), width=1.4)
    p.arrow((63.5, y + 2.5), (63.5, y + 5.2), (66, y + 5.2))
    p.text(66.6, y + 5.2, "loss, norm, verdict → host", 8.5, ha="left")
    for begin, end, words in (
        (2, 18, "every micro-step"),
        (23.5, 38.5, "when a unit is complete"),
        (42.5, 98, "once a step: the host queues all of it, then waits for the decision"),
    ):
        p.line((begin, bottom + 5), (end, bottom + 5), colour=FAINT)
        p.note((begin + end) / 2, bottom + 3.2, words)


def main():
    end_with_reader()
    Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    batch = Picture(58)
    batch_model(batch, 49.5)
    batch_block(batch, 16.5)
    batch_head(batch, 1)
    batch.save("step_batch.png")
    gradient = Picture(65)
    gradient_model(gradient, 60.5)
    gradient_block(gradient, 26)
    gradient_unit(gradient, 1)
    gradient.save("step_gradient.png")


if __name__ == "__main__":
    main()
