"""Write vitlab/data/imagenet21k.tsv.gz: the synset and the first name of each of ImageNet-21k's 21,843 classes.

    python benchmarks/imagenet21k_names.py

The order is that of the authors' 21k weights. Source: the lists in timm's package (Apache-2.0), names by WordNet.
"""

import gzip
import importlib.resources
from pathlib import Path

OUT = Path(__file__).parents[1] / "vitlab" / "data" / "imagenet21k.tsv.gz"


def main() -> None:
    folder = importlib.resources.files("timm.data") / "_info"
    synsets = (folder / "imagenet21k_goog_synsets.txt").read_text().split()
    pairs = (line.split("\t") for line in (folder / "imagenet_synset_to_lemma.txt").read_text().splitlines())
    names = {synset: lemmas.partition(",")[0] for synset, lemmas in pairs}
    lines = "".join(f"{synset}\t{names[synset]}\n" for synset in synsets)
    OUT.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))
    print(f"{OUT}: {len(synsets)} classes, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
