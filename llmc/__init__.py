"""llm.cu from Python: the trainer's own steps, with a loss, a schedule and data of one's own.

    import llmc
    with llmc.Trainer("gpt2:124M", batch_size=8, seq_len=1024) as t:
        for tokens, targets in llmc.rows("shards/*_train_*.bin", 8, 1024):
            t.train(tokens, targets)
            norm, verdict = t.step(learning_rate=3e-4)

llmc/trainer.py has the class, llmc/batches.py the rows; `llmc --help` is the command. Names are imported where they are
used first, so that modules which need no package (llmc.doctor, llmc.venv) can be run before numpy is there."""

from typing import TYPE_CHECKING

__all__ = ["Ended", "Error", "Samples", "Step", "Trainer", "rows"]
HOMES = {"rows": "llmc.batches"}

if TYPE_CHECKING:
    from llmc.batches import rows
    from llmc.trainer import Ended, Error, Samples, Step, Trainer
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'llmc' has no attribute '{name}'")
        from importlib import import_module

        return getattr(import_module(HOMES.get(name, "llmc.trainer")), name)


def __dir__() -> list[str]:
    return __all__
