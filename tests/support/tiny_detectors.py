"""Options of small detectors of transformers, and the words of a short run of one on drawn objects."""

from __future__ import annotations

import json

import drawn_objects

_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
_HGNET = {
    "model_type": "hgnet_v2", "embedding_size": 8, "hidden_sizes": [16, 16, 16, 32], "depths": [1] * 4,
    "stem_channels": [3, 8, 8], "stage_in_channels": [8, 16, 16, 16], "stage_mid_channels": [8] * 4,
    "stage_out_channels": [16, 16, 16, 32], "stage_num_blocks": [1] * 4, "stage_numb_of_layers": [1] * 4,
    "stage_downsample": [False, True, True, True], "stage_light_block": [False] * 4, "stage_kernel_size": [3] * 4,
    "out_indices": [2, 3, 4],
}  # fmt: skip
_SMALL = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 20,
}  # fmt: skip
RT_DETR = _SMALL | {
    "backbone_config": {**_RESNET, "model_type": "rt_detr_resnet", "out_indices": [2, 3, 4]}, "num_denoising": 10,
    "encoder_in_channels": [16, 16, 32], "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32],
}  # fmt: skip
_DETR = _SMALL | {"backbone_config": {**_RESNET, "model_type": "resnet", "out_features": ["stage4"]}}
_LEVELS = {"backbone_config": {**_RESNET, "model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}}
FAMILIES = [
    ("rt_detr_v2", RT_DETR), ("d_fine", RT_DETR | {"backbone_config": _HGNET}), ("detr", _DETR), ("rt_detr", RT_DETR),
    ("conditional_detr", _DETR | {"auxiliary_loss": True}), ("deformable_detr", _DETR | _LEVELS),
]  # fmt: skip
WORDS = (
    "experiment=detection", "data.root=drawn", *drawn_objects.COCO, "data.batch_size=2", "data.num_workers=0",
    "evaluate.batch_size=3", "evaluate.test=false", "threads=1", "epochs=2", "model.size=64", "scheduler.warmup=2",
    "transform.close_epochs=1", "model.options=" + json.dumps(RT_DETR).replace('"', ""),
)  # fmt: skip
