"""Write a checkpoint as safetensors, torch.export, ONNX or TorchScript, each compared with the model."""
