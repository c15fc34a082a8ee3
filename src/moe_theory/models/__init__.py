"""Routers, experts, and the MoE layer that joins them."""
