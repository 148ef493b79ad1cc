"""Attention: FlexAttention, and attention written as its formula or as a library's call."""
