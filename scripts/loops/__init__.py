"""Loops written by hand that `gpu.py` compares `runner` with, each as a function that yields after every epoch.

That of an MLP without CUDA graphs is `peers/bare_loop.py`.
"""
