"""The theory of sparse Mixture-of-Experts routing, as code a reader can run and check."""

__version__ = "0.1.0"
