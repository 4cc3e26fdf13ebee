"""Kernels for CUDA (Triton) and CPU. Import as ``kvpass.kernels``; nothing here is loaded by ``import kvpass``."""

if __name__ != "kvpass.kernels":
    # Found as plain `kernels`, because the checkout is on sys.path. Every import of transformers looks for a Hugging
    # Face package of this name and does not survive an ImportError, so look like one that is too old to be used.
    __version__ = "0"
    __path__ = []  # and keep the kernels from being imported a second time under another name
