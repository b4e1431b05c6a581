"""What people and other trainers call our settings and flags, beside the keys that their configs have."""

from __future__ import annotations

COMMON_NAMES = {
    **dict.fromkeys(("lr", "unet_lr", "lrate"), "optimizer.learning_rate"),
    **dict.fromkeys(("steps", "num_steps", "train_steps", "num_train_steps"), "train.max_steps"),
    **dict.fromkeys(("epoch", "epochs", "num_epochs"), "train.max_epochs"),
    **dict.fromkeys(("batch_size", "batch", "bs"), "train.effective_batch_size"),
    **dict.fromkeys(("dim", "lora_dim", "lora_rank", "network_rank", "linear"), "lora.rank"),
    **dict.fromkeys(("lora_alpha", "linear_alpha"), "lora.alpha"),
    **dict.fromkeys(("res", "size", "image_size"), "data.resolution"),
    **dict.fromkeys(("images", "image_dir", "data_dir", "dataset", "dataset_path", "folder_path"), "data.sources"),
    **dict.fromkeys(("train_data_dir", "instance_data_dir", "dataset_name", "dataset_dir"), "data.sources"),
    **dict.fromkeys(("base_model", "model_path", "name_or_path", "checkpoint", "ckpt"), "model.path"),
    **dict.fromkeys(("out", "out_dir", "output_folder", "save_dir", "training_folder"), "run.output"),
    **dict.fromkeys(("precision", "dtype"), "memory.weight_dtype"),
    **dict.fromkeys(("save_every", "save_steps", "checkpointing_steps"), "checkpoint.every_n_steps"),
    **dict.fromkeys(("optimizer", "optim"), "optimizer.name"),
    **dict.fromkeys(("trigger", "instance_prompt"), "captions.trigger_word"),
    **dict.fromkeys(("network_type", "network_module", "peft_type"), "lora.type"),
    "caption_column": "captions.column",
    "scheduler": "lr_scheduler.name",
    "sample_steps": "sample.num_inference_steps",
    "resume_from_checkpoint": "--resume",
    "config_file": "--config",
}
