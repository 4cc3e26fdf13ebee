"""Kernels for CUDA (Triton) and CPU (C++). Import as ``kvpass.kernels``; ``import kvpass`` loads none of them."""

if __name__ != "kvpass.kernels":
    # Imported as plain `kernels`, because the checkout is on sys.path. Every import of transformers looks for a Hugging
    # Face package of this name, and an ImportError here would break it. So look like a version too old to be used.
    __version__ = "0"
    __path__ = []  # so that the kernels cannot be imported a second time under another name
