"""Time and memory of a training step: all weights, low-rank updates, the head alone.

    python benchmarks/lora.py WEIGHTS --batch 16 --rank 8

Each in a process of its own, on one CPU thread: the median CPU time of three steps, and the peak of resident memory.
"""

import argparse
import multiprocessing
import resource
import statistics
import time

STEPS = 3


def measure(weights: str, batch: int, rank: int, kind: str) -> str:
    import torch
    import torch.nn.functional as F

    import vitlab
    from vitlab.training.lora import add_updates
    from vitlab.training.optim import make_optimizer

    torch.set_num_threads(1)
    model = vitlab.load(weights, classes=37).train()
    if kind == "low-rank updates":
        add_updates(model, rank, alpha=16.0, seed=0)
    elif kind == "head alone":
        for name, p in model.named_parameters():
            p.requires_grad_(name.startswith("head."))
    optimizer = make_optimizer(model, "adamw", weight_decay=0.0, betas=(0.9, 0.999), momentum=0.9)
    images, labels = torch.randn(batch, 3, *model.config.image_size), torch.randint(37, (batch,))
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(STEPS + 1):
        began = time.process_time()  # of this process alone, whatever else the machine does
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.process_time() - began)
    learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds, grown = statistics.median(times[1:]), (peak - before) >> 10
    return f"{kind:17} {learned:>10,} learn  {seconds:6.2f} s/step  {peak >> 10:5} MiB, {grown} of them for steps"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args()
    fresh = multiprocessing.get_context("spawn")
    for kind in ("all weights", "low-rank updates", "head alone"):
        with fresh.Pool(1) as pool:
            print(pool.apply(measure, (options.weights, options.batch, options.rank, kind)), flush=True)


if __name__ == "__main__":
    main()
