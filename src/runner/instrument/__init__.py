"""One way to look inside a model while it runs, without changing what training does.

- `no_trace`: run a model on the side and put back everything that running it changes.
- `observer`: functions called around the modules of a model, and with the gradients that reach its tensors.
- `nested`: the tensors in what a module takes and returns.
- `nonfinite`: where numbers are not finite.
- `flops`, `saved_tensors`: what a step computes, and what it keeps for backward.
- `profiler_ranges`: the parts of a step by name.
"""
