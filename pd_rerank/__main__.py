"""`python -m pd_rerank COMMAND`, the same as `pd-rerank COMMAND`."""

from pd_rerank.cli import main

main()
