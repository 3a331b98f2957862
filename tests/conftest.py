"""What all tests share: no network, and a fixed number of threads so that timings and rounding repeat."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # see the Makefile
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
