"""Make training labels: `python train/label.py OPTIONS` is `pd-rerank label OPTIONS`."""

import sys

from pd_rerank.cli import main

if __name__ == "__main__":
    main(["label", *sys.argv[1:]])
